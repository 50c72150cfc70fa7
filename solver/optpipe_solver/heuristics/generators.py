"""The papers' schedules as policies of list scheduling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from math import ceil
from time import monotonic
from typing import Protocol

from optpipe.errors import InputError
from optpipe.evaluate.memory import certify
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.process.child import Objective
from optpipe.schedule import Schedule
from optpipe_solver import systems
from optpipe_solver.heuristics.descent import descend, value
from optpipe_solver.heuristics.naive import in_turn
from optpipe_solver.heuristics.policy import Policy
from optpipe_solver.heuristics.policy_schedules import MANY
from optpipe_solver.heuristics.tolerance import tolerated

Shares = tuple[float, ...]
NEVER = float("inf")


class Stream(Protocol):
    """A heuristic's schedules, one after the other; it ends soon after the deadline, a moment of `time.monotonic`."""

    def __call__(self, problem: Problem, objective: Objective, deadline: float = NEVER) -> Iterator[Schedule]: ...


def naive(problem: Problem, objective: Objective, deadline: float = NEVER) -> Iterator[Schedule]:
    """One micro-batch at a time, with offload or recompute only where memory demands it: it fits wherever any schedule
    does."""
    yield in_turn(problem, "naive")


def zero_bubble(problem: Problem, objective: Objective, deadline: float = NEVER) -> Iterator[Schedule]:
    """Zero bubble's automatic schedule within memory (Qi et al. 2023, section 3): backwards are split, input gradients
    come first, weight gradients fill what is idle. Never worse than the handcrafted ZB-H1 and ZB-H2 where these fit."""
    aspects = {"in_flight": _limits(problem), "patience": (0.0, 0.5, 1.0), "alike": (False, True)}
    descent = descend(problem, objective, _starts(problem, [Policy()]), aspects, "zb-auto", deadline)
    if begin := [*islice(descent, 1), *_published(problem, ("zb-h1", "zb-h2"), "zb-auto", deadline)]:
        yield min(begin, key=lambda schedule: value(schedule, objective))
    yield from descent


def ada_offload(problem: Problem, objective: Objective, deadline: float = NEVER) -> Iterator[Schedule]:
    """AdaOffload (OptPipe, Algorithm 1): before its first backward a stage runs the forwards that memory admits, as
    many as delay that backward by the tolerance T at most; then an offload after each forward and a reload before its
    backward, as in PipeOffload.

    T (`tolerated`), what may be in flight, the share of activations that leave or are computed again, and how early a
    reload starts are searched by simulation. Where PO-H and PO-F (Wan et al. 2025) are for these stages and fit, it is
    never worse than they are.
    """
    can_offload, can_recompute = problem.costs.can_offload.tolist(), problem.costs.can_recompute.tolist()
    offloads, recomputes = _shares(problem, can_offload), _shares(problem, can_recompute)
    starts = [Policy(offload=offloads[0], patience=0.5)] if any(can_offload) else []
    if any(can_recompute):
        starts += [Policy(recompute=recomputes[0], patience=0.5), Policy(recompute=recomputes[1], patience=0.5)]
    starts += [_everything_leaves(problem)] if any(can_offload) else []
    aspects = {
        "offload": (None, *offloads) if any(can_offload) else (),
        "recompute": (None, *recomputes) if any(can_recompute) else (),
        "in_flight": _limits(problem),
        "patience": (0.0, 0.5, 1.0),
        "eager": (1.0, 1.5, 2.5),
        "alike": (False, True),
        "before": _tolerances(problem),
    }
    descent = descend(problem, objective, _starts(problem, starts or [Policy()]), aspects, "adaoffload", deadline)
    for first in islice(descent, 1):
        yield first
        others = sorted(
            _published(problem, ("po-h", "po-f"), "adaoffload", deadline),
            key=lambda schedule: value(schedule, objective),
        )
        yield from (schedule for schedule in others[:1] if value(schedule, objective) < value(first, objective))
    yield from descent


STREAMS: dict[str, Stream] = {
    "naive": naive,
    "zb-auto": zero_bubble,
    "adaoffload": ada_offload,
}


def _published(problem: Problem, names: Sequence[str], method: str, deadline: float) -> Iterator[Schedule]:
    """The systems among these that are for the problem's stages and fit, as this method's."""
    for name in names:
        if monotonic() > deadline:
            return
        with suppress(InputError):  # other stages than it is for
            schedule = replace(systems.generate(name, problem), method=method)
            if certify(problem, schedule).fits:
                yield schedule


def _everything_leaves(problem: Problem) -> Policy:
    everything = tuple(float(can) for can in problem.costs.can_offload.tolist())
    return Policy(in_flight=_to_the_end(problem, 1, 0), split=False, offload=everything)


def _starts(problem: Problem, policies: list[Policy]) -> list[Policy]:
    """What a descent begins with: where list scheduling takes its time, what finds its rhythm soonest; where ops may
    run in pairs, fused backwards as well, since a forward finds more to run with in them."""
    fused = [replace(policies[0], split=False)] if problem.overlap_factor is not None else []
    large = len(problem.stages) * problem.microbatches > MANY
    return [replace(policy, alike=large) for policy in (*policies, *fused)]


def _depths(problem: Problem) -> list[tuple[int, int]]:
    """(S,) of each stage how many stages remain on its route, itself included, and how long that route is; where there
    are several, of the one that takes longest from there."""
    found = [(0, 1)] * len(problem.stages)
    for route in problem.all_routes:
        for k, s in enumerate(route):
            found[s] = max(found[s], (len(route) - k, len(route)))
    return found


def _to_the_end(problem: Problem, factor: float, more: int) -> tuple[int, ...]:
    return tuple(max(1, ceil(factor * remain + more)) for remain, _ in _depths(problem))


def _limits(problem: Problem) -> tuple[tuple[int, ...] | None, ...]:
    """How many micro-batches may be in flight at each stage."""
    return (
        None,
        *(
            _to_the_end(problem, factor, more)
            for factor, more in ((1, 0), (1, 1), (1.5, 0), (2, -1), (0.75, 0), (0.75, 1))
        ),
    )


def _tolerances(problem: Problem) -> tuple[tuple[int, ...] | None, ...]:
    """AdaOffload's T: none, as a device does not make a backward wait for forwards anyway; a third of the longest F, B
    and W; all of it."""
    longest_ms = float(problem.costs.ms[[Kind.F, Kind.BW]].sum(axis=0).max())
    return (None, tolerated(problem, longest_ms / 3), tolerated(problem, longest_ms))


def _shares(problem: Problem, can: list[bool]) -> tuple[Shares, ...]:
    """Which share of a stage's activations leaves: all, all but the last stage's, fewer from stage to stage, or
    alike."""
    depths = _depths(problem)
    shapes = (
        [1.0 for _ in depths],
        [float(remain > 1) for remain, _ in depths],
        [remain / length for remain, length in depths],
        *([share] * len(depths) for share in (2 / 3, 1 / 2, 1 / 3)),
    )
    return tuple(tuple(share * possible for share, possible in zip(shape, can, strict=True)) for shape in shapes)
