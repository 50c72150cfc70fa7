"""The least device memory with which any schedule exists.

When the forward of stage b runs, every stage a before it on the route and on the same device is open, and holds at
least its residual: its activation, or what offload or recompute leave of it. So every schedule needs max over b of
activation_b + the residuals before b, and one micro-batch at a time needs no more. What remains is the choice per
stage, under the limit of pinned host memory. What may be evicted to a peer is taken to need no room there (`relaxed`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple, TypeVar

from optpipe.model.problem import Problem
from optpipe.model.records import Stage, StageCosts

MOST_STATES = 20_000  # of the search over the choices, looked at for one stage; equal stages need a handful


@dataclass(frozen=True)
class Relief:
    """What happens to a stage's activation between forward and backward: the parts that are offloaded, or recompute, or
    nothing."""

    parts: tuple[int, ...] = ()
    recompute: bool = False


Costs = TypeVar("Costs", bound=StageCosts)


class _State(NamedTuple):
    score: float  # the peak so far, or the time spent so far
    residual: int  # device bytes that the stages so far hold on to
    host: int  # host bytes that they took
    before: _State | None = None
    relief: Relief = Relief()  # the last stage's

    @property
    def chosen(self) -> tuple[Relief, ...]:
        """Of every stage so far."""
        found: list[Relief] = []
        state = self
        while state.before is not None:
            found.append(state.relief)
            state = state.before
        return tuple(reversed(found))


def relaxed(costs: Costs) -> Costs:
    """What is no dearer and has a schedule no longer for every schedule: instead of being evicted an activation leaves
    as much for nothing and is back at once, as a recompute that takes no time has it. So what holds for all schedules
    of this holds for evictions, too."""
    if not costs.can_evict:
        return costs
    stays = costs.activation_bytes - (costs.evict_bytes or 0)
    kept = stays if costs.checkpoint_bytes is None else min(stays, costs.checkpoint_bytes)
    return costs.model_copy(
        update={"recompute_ms": 0.0, "checkpoint_bytes": kept, "evict_ms": None, "load_ms": None, "evict_bytes": None}
    )


def without_evictions(problem: Problem) -> Problem:
    """The problem with `relaxed` stages and layers: a bound on its schedules is one on those of the problem."""
    if not any(costs.can_evict for costs in (*problem.stages, *(problem.layers or ()))):
        return problem
    layers = problem.layers and tuple(map(relaxed, problem.layers))
    return problem.model_copy(update={"stages": tuple(map(relaxed, problem.stages)), "layers": layers})


def least_memory(problem: Problem) -> list[int]:
    """(D,) the bytes below which no schedule exists, per device."""
    problem = without_evictions(problem)
    return [
        max((_least(problem, d, route, host=True) for route in used_routes(problem)), default=0)
        for d in range(len(problem.devices))
    ]


def infeasibility(problem: Problem) -> str | None:
    """Which device cannot hold even one micro-batch, what it needs and what it has; None where a schedule exists."""
    for d, (needed, device) in enumerate(zip(least_memory(problem), problem.devices, strict=True)):
        if needed > device.activation_budget_bytes:
            without_limit = max(
                _least(without_evictions(problem), d, route, host=False) for route in used_routes(problem)
            )
            why = (
                f", as its host_memory_bytes = {device.host_memory_bytes} admit no more offload"
                if without_limit < needed
                else ""
            )
            return (
                f"device {d} needs at least {needed} bytes for one micro-batch at a time and has "
                f"{device.activation_budget_bytes}{why}"
            )
    return None


def reliefs(problem: Problem, route: tuple[int, ...]) -> dict[int, Relief]:
    """For one micro-batch at a time on a route: what to offload or recompute, least time first, so that every device's
    memory suffices.

    Where a device's memory does not suffice its stages keep everything; `infeasibility` says so beforehand.
    """
    found: dict[int, Relief] = {}
    for d, device in enumerate(problem.devices):
        own = [s for s in route if problem.stages[s].device == d]
        states = _search([problem.stages[s] for s in own], device.host_memory_bytes, device.activation_budget_bytes)[0]
        best = min(states, key=lambda state: state.score, default=None)
        found |= dict(zip(own, best.chosen if best else (Relief(),) * len(own), strict=True))
    return found


def used_routes(problem: Problem) -> list[tuple[int, ...]]:
    """The routes that some micro-batch takes."""
    return [problem.all_routes[r] for r in sorted(set(problem.costs.route.tolist()))]


def part_bytes(stage: Stage) -> list[int]:
    """(offload_parts,) the bytes of each part."""
    total, n = stage.offload_bytes or 0, stage.offload_parts
    return [total * (p + 1) // n - total * p // n for p in range(n)]


def _least(problem: Problem, device: int, route: tuple[int, ...], host: bool) -> int:
    stages = [problem.stages[s] for s in route if problem.stages[s].device == device]
    states, complete = _search(stages, problem.devices[device].host_memory_bytes if host else None, None)
    if not complete:  # too many choices to try: what no limit of host memory would allow is a bound still
        return _least(problem, device, route, host=False)
    return int(min(state.score for state in states))


def _search(stages: list[Stage], host: int | None, memory: int | None) -> tuple[list[_State], bool]:
    """The choices for stages in route order that no other beats in all respects, and whether none of them was left out.

    The score is the peak in bytes, or, where `memory` is given, the time in ms of the choices whose peak it admits.
    """
    states, complete = [_State(0, 0, 0)], True
    unlimited = host is None or sum(stage.offload_bytes or 0 for stage in stages) <= host
    for k, stage in enumerate(stages):
        options = (
            [(Relief(), stage.activation_bytes, 0, 0.0)] if k == len(stages) - 1 else list(_options(stage, unlimited))
        )
        following = []
        most = max(1, MOST_STATES // len(options))
        if len(states) > most:
            states, complete = sorted(states, key=lambda state: state.residual)[:most], False
        for state in states:
            peak = state.residual + stage.activation_bytes
            if memory is not None and peak > memory:
                continue
            for relief, residual, taken, cost in options:
                if host is None or state.host + taken <= host:
                    score = max(state.score, peak) if memory is None else state.score + cost
                    following.append(_State(score, state.residual + residual, state.host + taken, state, relief))
        states = _undominated(following, unlimited)
    return states, complete


def _options(stage: Stage, all_parts: bool) -> Iterator[tuple[Relief, int, int, float]]:
    """A stage's choices: what it is, device bytes left, host bytes taken, ms."""
    activation = stage.activation_bytes
    yield Relief(), activation, 0, 0.0
    if stage.can_recompute:
        yield Relief(recompute=True), stage.checkpoint_bytes or 0, 0, stage.recompute_ms or 0.0
    if stage.can_offload:
        total, n = stage.offload_bytes or 0, stage.offload_parts
        each = (stage.offload_ms or 0.0) / n + (stage.reload_ms or 0.0) / n
        size = part_bytes(stage)
        larger = [
            p for p in range(n) if size[p] > total // n
        ]  # parts differ by a byte where n does not divide the total
        smaller = [p for p in range(n) if size[p] == total // n]
        for count in (n,) if all_parts else range(1, n + 1):
            for large in range(max(0, count - len(smaller)), min(count, len(larger)) + 1):
                taken = count * (total // n) + large
                parts = tuple(sorted(larger[:large] + smaller[: count - large]))
                yield Relief(parts), activation - taken, taken, count * each


def _undominated(states: list[_State], host_is_free: bool) -> list[_State]:
    """Those that no other equals or betters in score, residual and host bytes."""
    kept: list[_State] = []
    residuals: list[int] = []  # of what is kept, the least host bytes for a residual: rising residuals,
    hosts: list[int] = []  # falling host bytes
    for state in sorted(states, key=itemgetter(0, 1, 2)):
        host = 0 if host_is_free else state.host
        place = bisect_right(residuals, state.residual)
        if place and hosts[place - 1] <= host:
            continue
        kept.append(state)
        worse = place
        while worse < len(hosts) and hosts[worse] >= host:
            worse += 1
        residuals[place:worse], hosts[place:worse] = [state.residual], [host]
    return kept
