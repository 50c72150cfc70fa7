"""The papers' heuristics: which policies they begin with, and what a search may change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from math import ceil
from time import monotonic
from typing import NamedTuple, Protocol

from optpipe.dispatch.memory_shares import CHOICES, memory_shares
from optpipe.dispatch.starts import entry_orders
from optpipe.errors import InputError
from optpipe.evaluate.objective import NEVER, Objective, length_ms
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, certify
from optpipe_solver import systems
from optpipe_solver.heuristics.descent import descend
from optpipe_solver.heuristics.naive import one_at_a_time
from optpipe_solver.heuristics.policy import Policy


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
    aspects = {"in_flight": _limits(problem), "patience": (0.0, 0.5, 1.0), "order": _orders(problem)}
    descent = descend(problem, objective, _starts(problem, [_all_stay(problem)]), aspects, "zb-auto", deadline)
    yield from _with_published(descent, ("zb-h1", "zb-h2"), problem, objective, deadline)


def ada_offload(problem: Problem, objective: Objective, deadline: float = NEVER) -> Iterator[Schedule]:
    """AdaOffload (OptPipe, Algorithm 1).

    Before its first backward a stage runs the forwards that memory admits. Then an offload follows each forward and a
    reload precedes its backward, as in PipeOffload. What may be in flight, the share of activations that leave or are
    recomputed, and how early a reload starts are searched by simulation. It is never worse than PO-H and PO-F (Wan et
    al. 2025) where these apply to the stages and fit.
    """
    offloads = _shares(problem, problem.costs.can_offload.tolist())
    recomputes = _shares(problem, problem.costs.can_recompute.tolist())
    all_stay, everything, all_but_last = _all_stay(problem), 0, 1
    starts = [replace(all_stay, offload=offloads[everything], patience=0.5)] if offloads else []
    levels = [(k,) * len(problem.stages) for k in range(max(1, problem.costs.levels.count.max()))]
    starts += [
        replace(all_stay, recompute=recomputes[shape], patience=0.5, level=level)
        for level in levels
        for shape in (everything, all_but_last)
        if recomputes
    ]
    if offloads:
        to_the_end = _to_the_end(problem, 1, 0)
        starts.append(replace(all_stay, in_flight=to_the_end, split=False, offload=offloads[everything]))
    aspects = {
        "offload": (all_stay.offload, *offloads),
        "recompute": (all_stay.recompute, *recomputes),
        "level": levels,
        "in_flight": _limits(problem),
        "patience": (0.0, 0.5, 1.0),
        "eager": (1.0, 1.5, 2.5),
        "order": _orders(problem),
    }
    descent = descend(problem, objective, _starts(problem, starts or [all_stay]), aspects, "adaoffload", deadline)
    yield from _with_published(descent, ("po-h", "po-f"), problem, objective, deadline)


STREAMS: dict[str, Stream] = {
    "naive": naive,
    "zb-auto": zero_bubble,
    "adaoffload": ada_offload,
}


def _with_published(
    descent: Iterator[Schedule], names: Sequence[str], problem: Problem, objective: Objective, deadline: float
) -> Iterator[Schedule]:
    """Yield the descent's schedules and, after the first, the shortest of these systems' if it is shorter.

    Those count that apply to the problem's stages and fit.
    """
    for first in islice(descent, 1):
        yield first
        shortest = first
        for name in names:
            if monotonic() < deadline:
                with suppress(InputError):  # it does not apply to these stages
                    schedule = replace(systems.in_best_order(name, problem, "keep", objective), method=first.method)
                    if certify(problem, schedule).fits:
                        shortest = min(shortest, schedule, key=lambda each: length_ms(each, objective))
        if shortest is not first:
            yield shortest
    yield from descent


def _all_stay(problem: Problem) -> Policy:
    """As many in flight as memory admits; nothing leaves or is computed again."""
    stages = len(problem.stages)
    return Policy((problem.microbatches,) * stages, (0.0,) * stages, (0.0,) * stages, level=(0,) * stages)


def _starts(problem: Problem, policies: list[Policy]) -> list[Policy]:
    """Return the policies that a descent begins with.

    Where micro-batches differ, the first one comes in all orders of entry. Where ops may run in pairs fused backwards
    come in as well, since a forward finds more to run with in them.
    """
    ordered = [replace(policies[0], order=order) for order in _orders(problem)[1:]]
    fused = [replace(policies[0], split=False)] if problem.overlap_factor is not None else []
    return [*policies, *ordered, *fused]


def _orders(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Return the orders of entry to try, that of the numbers, which is empty, first."""
    return ((), *(tuple(order.tolist()) for order in islice(entry_orders(problem), 1, None)))


class _Place(NamedTuple):
    """Where a stage is on its route."""

    remaining: int  # stages to the end, itself included
    length: int  # stages of the route


def _places(problem: Problem) -> list[_Place]:
    """Return (S,) where each stage is; of several routes on that which is longest from there."""
    places = [_Place(0, 1)] * len(problem.stages)
    for route in problem.all_routes:
        for k, s in enumerate(route):
            places[s] = max(places[s], _Place(len(route) - k, len(route)))
    return places


def _to_the_end(problem: Problem, factor: float, more: int) -> tuple[int, ...]:
    return tuple(max(1, ceil(factor * place.remaining + more)) for place in _places(problem))


def _limits(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Return choices of how many micro-batches may be in flight at each stage."""
    by_place = ((1, 0), (1, 1), (1.5, 0), (2, -1), (0.75, 0), (0.75, 1))
    return (
        _all_stay(problem).in_flight,
        *_shares_of_memory(problem),
        *(_to_the_end(problem, factor, more) for factor, more in by_place),
    )


def _shares_of_memory(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Yield choices for devices with several stages, which share their memory."""
    if len(problem.all_routes) == 1 and len(problem.stages) > len(problem.devices):
        for more, extra in CHOICES:
            by_stage = dict(zip(problem.route(0), memory_shares(problem, more, extra).tolist(), strict=True))
            yield tuple(by_stage[s] for s in range(len(by_stage)))


def _shares(problem: Problem, can: list[bool]) -> list[tuple[float, ...]]:
    """Return choices of the share of activations that leaves: all, all but the last stage's, fewer from stage to stage,
    or the same share of each; none if none can."""
    places = _places(problem)
    shapes = (
        [1.0 for _ in places],
        [float(place.remaining > 1) for place in places],
        [place.remaining / place.length for place in places],
        *([share] * len(places) for share in (2 / 3, 1 / 2, 1 / 3)),
    )
    return [tuple(share * able for share, able in zip(shape, can, strict=True)) for shape in shapes] if any(can) else []
