"""Why a schedule is shorter than another: what both do differently."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optpipe.model.problem import Problem
    from optpipe.schedule import Schedule

MOST_FORWARDS = 2048  # stages times micro-batches; with more it takes longer than a second to make them all


def gain_lines(before: Schedule, after: Schedule) -> Iterator[str]:
    """Two lines: how much shorter the second schedule is, and why; none if it is not."""
    if after.makespan_ms < 0.9995 * before.makespan_ms:
        yield f"OptPipe's schedule {gained(before, after)}"
        yield f"Why: {why(before, after)}."


def best_published(problem: Problem) -> Schedule | None:
    """The shortest schedule of the other papers that fits on the stages as given, for a problem that is not large."""
    from optpipe import solvers
    from optpipe.errors import OptPipeError
    from optpipe_solver.systems import SYSTEMS, in_best_order

    best = None
    if len(problem.stages) * problem.microbatches > MOST_FORWARDS:
        return None
    for method in SYSTEMS:
        if method in solvers.installed().OWN:
            continue
        try:
            schedule = in_best_order(method, problem)
        except OptPipeError:
            continue
        if not schedule.compiled.complaints and (best is None or schedule.makespan_ms < best.makespan_ms):
            best = schedule
    return best


def gained(before: Schedule, after: Schedule) -> str:
    """How much shorter one schedule is than another, as the end of a sentence."""
    less = 1 - after.makespan_ms / before.makespan_ms
    stages = ", on other stages" if after.placement != before.placement else ""
    return (
        f"takes {less:.{0 if less > 0.1 else 1}%} less time than {before.method}, the best published one that fits: "
        f"{_ms(after)} instead of {_ms(before)} ms{stages}."
    )


def _ms(schedule: Schedule) -> str:
    return f"{schedule.makespan_ms:.4g}" if schedule.makespan_ms < 1000 else f"{schedule.makespan_ms:.0f}"


def why(before: Schedule, after: Schedule) -> str:
    """What makes the second schedule shorter: what both do differently, in one sentence."""
    from optpipe.model.ops import Kind

    def share(schedule: Schedule, kind: Kind) -> float:
        rows = schedule.timeline.rows
        return float((rows.of_kinds(kind) & (rows.part == 0)).sum() / rows.of_kinds(Kind.F).sum())

    facts = [
        f"{does} {share(after, kind):.0%} of all activations instead of {share(before, kind):.0%}"
        for kind, does in ((Kind.C, "recomputes"), (Kind.O, "offloads"))
        if share(before, kind) != share(after, kind)
    ]
    waiting = f"devices wait {after.timeline.bubble:.0%} of the time instead of {before.timeline.bubble:.0%}"
    return "within the same memory " + (f"it {', '.join(facts)}, and its " if facts else "its ") + waiting
