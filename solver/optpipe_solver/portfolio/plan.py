"""What runs when: the one place to tune. Heuristics first, in the solver's own process, then engines, each in a process
of its own.

Threads are dealt out in lanes. Heuristics keep one lane for their share of the time; on every free lane the next turn
of the table starts, from the best schedule so far. A turn lasts its share of the engines' time; one that ends early
leaves the rest to those behind it. Turns marked `again` fill what is left, each from the best so far and with another
seed. With one thread there is one lane: one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from optpipe.model.problem import Problem
from optpipe_solver import methods

LANES = 2  # engines side by side; with more threads than that each has several
HEURISTICS_SHARE = 0.15  # of the time, where engines follow
HEURISTICS_S = 2.0  # at least that long, or half of a short time: until then they gain more than engines do
COUNTED_SHARE = (
    0.75  # of the engines' time is planned with one thread, so that what is counted fits in on a busy machine, too
)


@dataclass(frozen=True)
class Turn:
    """One engine's run."""

    engine: str
    share: float = 1.0  # of the engines' time on all lanes
    most_passes: int | None = (
        None  # micro-batches through stages: a larger problem is not for this engine within a minute or so
    )
    again: bool = False  # over and over until time is up
    anew: bool = False  # from a heuristic's schedule and not from the best, which other windows may have led astray


AUTO = (
    Turn("cyclic", 0.12),  # patterns, and windows of the best of them
    Turn("cpsat", 0.24, most_passes=64),  # the whole problem at once: proves what is small
    Turn("lns", 0.12),  # windows of the best schedule
    Turn("milp", 0.03),  # the paper's formulation; proves what is tiny
    Turn("cpsat", 0.08),  # of what is less small, another neighbourhood (its own `applies` says what that is)
    Turn("lns", 0.08, again=True, anew=True),
    Turn("lns", 0.08, again=True),
)
ROBUST = Turn(methods.ROBUST, 0.25, again=True)  # beside the others where op times vary


def heuristics_share(seconds: float) -> float:
    """Of the time, where engines follow."""
    return max(HEURISTICS_SHARE, min(0.5, HEURISTICS_S / seconds))


def turns(method: str, jitter: float, problem: Problem, applies: Callable[[str], bool]) -> list[Turn]:
    """The turns of a method in the order in which they start; none for a heuristic. `applies` says whether an engine is
    for the problem."""
    if method in methods.ENGINES:
        return [Turn(method)] if applies(method) else []
    if method != "auto":
        return []
    passes = sum(len(problem.route(j)) for j in range(problem.microbatches))
    due = [turn for turn in AUTO if (turn.most_passes is None or passes <= turn.most_passes) and applies(turn.engine)]
    due += [ROBUST] if jitter and applies(ROBUST.engine) else []
    total = sum(turn.share for turn in due)
    filled = any(turn.again for turn in due) and total <= 1
    return due if filled else [replace(turn, share=turn.share / total) for turn in due]
