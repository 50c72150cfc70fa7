"""The papers' schedules as policies of list scheduling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from math import ceil
from time import monotonic
from typing import Protocol

from optpipe.dispatch.memory_shares import CHOICES, memory_shares
from optpipe.errors import InputError
from optpipe.evaluate.objective import NEVER, Objective, length_ms
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, certify
from optpipe_solver import systems
from optpipe_solver.heuristics.descent import descend
from optpipe_solver.heuristics.naive import one_at_a_time
from optpipe_solver.heuristics.policy import Policy
from optpipe_solver.heuristics.policy_schedules import is_large
from optpipe_solver.heuristics.tolerance import tolerated_forwards

Shares = tuple[float, ...]


class Stream(Protocol):
    """A heuristic: yields schedules, and ends soon after the deadline, a moment of `time.monotonic`."""

    def __call__(self, problem: Problem, objective: Objective, deadline: float = NEVER) -> Iterator[Schedule]: ...


def naive(problem: Problem, objective: Objective, deadline: float = NEVER) -> Iterator[Schedule]:
    """One micro-batch at a time, with offload or recompute only where memory demands it."""
    yield one_at_a_time(problem, "naive")


def zero_bubble(problem: Problem, objective: Objective, deadline: float = NEVER) -> Iterator[Schedule]:
    """Zero bubble's automatic schedule within memory (Qi et al. 2023, section 3).

    Backwards are split, input gradients come first, weight gradients fill what is idle. It is never worse than the
    handcrafted ZB-H1 and ZB-H2 where these fit.
    """
    aspects = {"in_flight": _limits(problem), "patience": (0.0, 0.5, 1.0), "alike": (False, True)}
    descent = descend(problem, objective, _starts(problem, [Policy()]), aspects, "zb-auto", deadline)
    if begin := [*islice(descent, 1), *_published(problem, ("zb-h1", "zb-h2"), "zb-auto", deadline)]:
        yield min(begin, key=lambda schedule: length_ms(schedule, objective))
    yield from descent


def ada_offload(problem: Problem, objective: Objective, deadline: float = NEVER) -> Iterator[Schedule]:
    """AdaOffload (OptPipe, Algorithm 1).

    Before its first backward a stage runs the forwards that memory admits, as many as delay that backward by the
    tolerance T at most. Then an offload follows each forward and a reload precedes its backward, as in PipeOffload. T
    (`tolerated_forwards`), what may be in flight, the share of activations that leave or are recomputed, and how early
    a reload starts are searched by simulation. It is never worse than PO-H and PO-F (Wan et al. 2025) where these apply
    to the stages and fit.
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
            key=lambda schedule: length_ms(schedule, objective),
        )
        yield from (schedule for schedule in others[:1] if length_ms(schedule, objective) < length_ms(first, objective))
    yield from descent


STREAMS: dict[str, Stream] = {
    "naive": naive,
    "zb-auto": zero_bubble,
    "adaoffload": ada_offload,
}


def _published(problem: Problem, names: Sequence[str], method: str, deadline: float) -> Iterator[Schedule]:
    """Yield the schedules of these systems that apply to the problem's stages and fit, under the name of a method."""
    for name in names:
        if monotonic() > deadline:
            return
        with suppress(InputError):  # it does not apply to these stages
            schedule = replace(systems.generate(name, problem), method=method)
            if certify(problem, schedule).fits:
                yield schedule


def _everything_leaves(problem: Problem) -> Policy:
    everything = tuple(float(can) for can in problem.costs.can_offload.tolist())
    return Policy(in_flight=_to_the_end(problem, 1, 0), split=False, offload=everything)


def _starts(problem: Problem, policies: list[Policy]) -> list[Policy]:
    """Return the policies that a descent begins with.

    Large problems begin with what becomes periodic soonest. Where ops may run in pairs fused backwards come in as well,
    since a forward finds more to run with in them.
    """
    fused = [replace(policies[0], split=False)] if problem.overlap_factor is not None else []
    return [replace(policy, alike=is_large(problem)) for policy in (*policies, *fused)]


def _depths(problem: Problem) -> list[tuple[int, int]]:
    """Return (S,) how many stages remain on a stage's route, itself included, and the number of stages of that route.

    Of several routes it is the one that takes longest from there.
    """
    found = [(0, 1)] * len(problem.stages)
    for route in problem.all_routes:
        for k, s in enumerate(route):
            found[s] = max(found[s], (len(route) - k, len(route)))
    return found


def _to_the_end(problem: Problem, factor: float, more: int) -> tuple[int, ...]:
    return tuple(max(1, ceil(factor * remain + more)) for remain, _ in _depths(problem))


def _limits(problem: Problem) -> tuple[tuple[int, ...] | None, ...]:
    """Return choices of how many micro-batches may be in flight at each stage."""
    return (
        None,
        *_shares_of_memory(problem),
        *(
            _to_the_end(problem, factor, more)
            for factor, more in ((1, 0), (1, 1), (1.5, 0), (2, -1), (0.75, 0), (0.75, 1))
        ),
    )


def _shares_of_memory(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Yield choices for devices with several stages, which share their memory."""
    if len(problem.all_routes) == 1 and len(problem.stages) > len(problem.devices):
        for more, extra in CHOICES:
            by_stage = dict(zip(problem.route(0), memory_shares(problem, more, extra).tolist(), strict=True))
            yield tuple(by_stage[s] for s in range(len(by_stage)))


def _tolerances(problem: Problem) -> tuple[tuple[int, ...] | None, ...]:
    """Return choices of the forwards before the first backward: for T none, or a third or all of the longest op."""
    longest_ms = float(problem.costs.ms[[Kind.F, Kind.BW]].sum(axis=0).max())
    return (None, tolerated_forwards(problem, longest_ms / 3), tolerated_forwards(problem, longest_ms))


def _shares(problem: Problem, can: list[bool]) -> tuple[Shares, ...]:
    """Return choices of the share of activations that leaves: all, all but the last stage's, fewer from stage to stage,
    or the same share of each."""
    depths = _depths(problem)
    shapes = (
        [1.0 for _ in depths],
        [float(remain > 1) for remain, _ in depths],
        [remain / length for remain, length in depths],
        *([share] * len(depths) for share in (2 / 3, 1 / 2, 1 / 3)),
    )
    return tuple(tuple(share * possible for share, possible in zip(shape, can, strict=True)) for shape in shapes)
