"""The least device memory with which any schedule exists.

When the forward of stage b runs, every stage a before it on the route and on the same device is open, and holds at
least its residual: its activation, or what offload or recompute leave of it. So every schedule needs the maximum over b
of what b needs by itself and the residuals before b, and one micro-batch at a time needs no more. What remains is the
choice for each stage, under the limit of pinned host memory. What may be evicted to a peer is taken to need no room
there (`without_evictions`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from optpipe.model.arrays import NONE
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.text import distinct_sizes
from optpipe_solver import tuning
from optpipe_solver.bounds.problem_facts import StageBytes, stage_bytes, without_evictions


@dataclass(frozen=True)
class Relief:
    """What happens to an activation between forward and backward: parts of it are offloaded, or it is recomputed by a
    level, and parts of its checkpoint are offloaded."""

    parts: tuple[int, ...] = ()
    level: int = NONE

    @property
    def is_recomputed(self) -> bool:
        return self.level != NONE


class _Option(NamedTuple):
    """One choice for a stage's activation."""

    relief: Relief
    peak: int  # device bytes that the stage needs by itself
    residual: int  # device bytes between forward and backward
    host: int  # bytes of pinned host memory
    ms: float  # of transfers and recompute


class _State(NamedTuple):
    """The choices for the first stages of a route."""

    score: float  # the peak so far, or the time spent so far
    residual: int  # device bytes that these stages hold on to
    host: int  # host bytes that they take
    before: _State | None = None
    relief: Relief = Relief()  # of the last of these stages

    @property
    def reliefs(self) -> tuple[Relief, ...]:
        """Of each of these stages, in order."""
        reliefs, state = list[Relief](), self
        while state.before is not None:
            reliefs.append(state.relief)
            state = state.before
        return tuple(reversed(reliefs))


def least_memory(problem: Problem) -> list[int]:
    """Return (D,) the bytes below which no schedule exists, of each device."""
    problem = without_evictions(problem)
    return [max(_least(problem, d)) for d in range(len(problem.devices))]


def infeasibility(problem: Problem) -> str | None:
    """Say which device, or the host memory of which node, cannot hold even one micro-batch, what it needs and has; None
    if a schedule exists."""
    problem = without_evictions(problem)
    for d, device in enumerate(problem.devices):
        each = _least(problem, d)
        needed = max(each)
        if needed > device.activation_budget_bytes:
            limited = max(_least(problem, d, limit_host=False)) < needed
            on_host = int(problem.costs.host_memory[d])
            least, budget, host = distinct_sizes(needed, device.activation_budget_bytes, on_host)
            whose = "its node's" if device.node else "its"
            why = f", as {whose} host_memory_bytes = {host} admit no more offload" if limited else ""
            hungriest = problem.costs.representatives[each.index(needed)]
            which = "one micro-batch" if problem.costs.are_equal else f"micro-batch {hungriest}"
            return f"devices[{d}].activation_budget_bytes = {budget}: {which} at a time needs at least {least}{why}"
    for devices, hosts in _scarce_nodes(problem):
        first, pinned = devices[0], sum(nbytes for nbytes, _ in hosts)
        if pinned > problem.costs.host_memory[first] and all(certain for _, certain in hosts):
            needs, has = distinct_sizes(pinned, int(problem.costs.host_memory[first]))
            name = problem.devices[first].node
            return (
                f"devices[{first}].host_memory_bytes: those of node {name!r} add up to {has}, and one micro-batch at a "
                f"time needs at least {needs} there"
            )
    return None


def host_shares(problem: Problem) -> list[int]:
    """Return (D,) the bytes of host memory that each device may pin so that every micro-batch alone fits: those of its
    node or, where devices share too little, what it needs at least and an equal share of the rest."""
    shares: list[int] = problem.costs.host_memory.tolist()
    for devices, each in _scarce_nodes(problem):
        spare = max(0, shares[devices[0]] - sum(least for least, _ in each)) // len(devices)
        for d, (least, _) in zip(devices, each, strict=True):
            shares[d] = least + spare
    return shares


def _scarce_nodes(problem: Problem) -> Iterator[tuple[list[int], list[tuple[int, bool]]]]:
    """Yield the devices of each node with too little host memory, the least bytes each has to pin, and whether that is
    certain."""
    costs = problem.costs
    for n in np.unique(costs.node[costs.host_is_scarce]).tolist():
        devices = np.flatnonzero(costs.node == n).tolist()
        if len(devices) > 1:
            yield devices, [_least_host(problem, d) for d in devices]


def _least_host(problem: Problem, device: int) -> tuple[int, bool]:
    """Return the least bytes that a device has to pin for the micro-batch alone that needs most, and whether no choice
    was left out; 0 if no host memory of its node would do."""
    most, certain = 0, True
    for j in problem.costs.representatives.tolist():
        held, stages = stage_bytes(problem, j), [s for s in problem.route(j) if problem.stages[s].device == device]
        needed, host = 0, int(problem.costs.host_memory[device])
        while host >= 0:  # a search in which all fits does not minimize host bytes, so one has a byte less
            states, complete = _search(problem, j, held, stages, host, problem.devices[device].activation_budget_bytes)
            if not states:
                certain &= complete
                break
            needed = min(state.host for state in states)
            host = needed - 1
        most = max(most, needed)
    return most, certain


def reliefs(problem: Problem, microbatch: int, hosts: Sequence[int]) -> dict[int, Relief]:
    """For a micro-batch alone, choose what to offload or recompute so that every device's memory suffices, and none
    pins more bytes than its share in `hosts` (D,) (`host_shares`).

    The choice takes the least time. Where a device's memory does not suffice its stages keep everything;
    `infeasibility` says so beforehand.
    """
    held, route = stage_bytes(problem, microbatch), problem.route(microbatch)
    chosen: dict[int, Relief] = {}
    for d, device in enumerate(problem.devices):
        stages = [s for s in route if problem.stages[s].device == d]
        states, _ = _search(problem, microbatch, held, stages, hosts[d], device.activation_budget_bytes)
        best = min(states, key=lambda state: state.score, default=None)
        chosen |= dict(zip(stages, best.reliefs if best else (Relief(),) * len(stages), strict=True))
    return chosen


def _least(problem: Problem, device: int, limit_host: bool = True) -> list[int]:
    """Return the least bytes of a device for one micro-batch of each class alone."""
    limit = int(problem.costs.host_memory[device]) if limit_host else None
    least = []
    for j in problem.costs.representatives.tolist():
        held, stages = stage_bytes(problem, j), [s for s in problem.route(j) if problem.stages[s].device == device]
        states, complete = _search(problem, j, held, stages, limit, None)
        if not complete:  # too many choices to try: what no limit of host memory would allow is still a bound
            states, _ = _search(problem, j, held, stages, None, None)
        least.append(int(min(state.score for state in states)))
    return least


def _search(
    problem: Problem, j: int, held: list[StageBytes], stages: Sequence[int], host: int | None, memory: int | None
) -> tuple[list[_State], bool]:
    """Find the choices for micro-batch j's stages in route order that no other beats in all respects, and whether none
    was left out. Their score is the peak in bytes or, if `memory` is given, the time in ms of those whose peak it
    admits."""
    states, complete, costs = [_State(0, 0, 0)], True, problem.costs
    most_hosted = np.max([costs.offload[:, j], *costs.levels.offload[..., j]], axis=0)[stages].sum()
    host_is_free = host is None or int(most_hosted) <= host
    for s in stages:
        options = list(_options(problem, s, j, held[s], host_is_free))
        if s == stages[-1]:
            options = options[:1]  # nothing else runs on the device before its backward
        following = []
        most = max(1, tuning.RELIEF_STATES // len(options))
        if len(states) > most:
            states, complete = sorted(states, key=lambda state: state.residual)[:most], False
        for state in states:
            for option in options:
                peak, taken = state.residual + option.peak, state.host + option.host
                if (host is None or taken <= host) and (memory is None or peak <= memory):
                    score = max(state.score, peak) if memory is None else state.score + option.ms
                    following.append(_State(score, state.residual + option.residual, taken, state, option.relief))
        states = _undominated(following, host_is_free)
    return states, complete


def _options(problem: Problem, s: int, j: int, held: StageBytes, only_all_parts: bool) -> Iterator[_Option]:
    """Yield a stage's choices; the first is that its activation stays."""
    costs, levels = problem.costs, problem.costs.levels
    stays = _Option(Relief(), held.peak, held.stays, 0, 0.0)
    yield stays
    if held.parts:
        yield from _less(stays, held.parts, float(costs.ms[[Kind.O, Kind.R], s, j].sum()), only_all_parts)
    for k, level in enumerate(held.levels):
        again = _Option(Relief((), k), level.peak, level.checkpoint, 0, float(levels.recompute_ms[k, s, j]))
        yield again
        if level.parts:
            each_ms = float(levels.offload_ms[k, s, j] + levels.reload_ms[k, s, j])
            yield from _less(again, level.parts, each_ms, only_all_parts)


def _less(whole: _Option, sizes: Sequence[int], each_ms: float, only_all_parts: bool) -> Iterator[_Option]:
    """Yield a choice with parts of these sizes of the residual offloaded."""
    n, smallest = len(sizes), min(sizes)  # parts differ by a byte where their number does not divide the total
    larger = [part for part in range(n) if sizes[part] > smallest]
    smaller = [part for part in range(n) if sizes[part] == smallest]
    for count in (n,) if only_all_parts else range(1, n + 1):
        for large in range(max(0, count - len(smaller)), min(count, len(larger)) + 1):
            parts = tuple(sorted(larger[:large] + smaller[: count - large]))
            taken, ms = sum(sizes[part] for part in parts), whole.ms + count * each_ms
            yield _Option(Relief(parts, whole.relief.level), whole.peak, whole.residual - taken, taken, ms)


def _undominated(states: list[_State], host_is_free: bool) -> list[_State]:
    """Keep those that no other equals or betters in score, residual and host bytes."""
    kept: list[_State] = []
    residuals: list[int] = []  # of what is kept, the least host bytes for a residual: rising residuals,
    hosts: list[int] = []  # falling host bytes
    for state in sorted(states, key=itemgetter(0, 1, 2)):
        host = 0 if host_is_free else state.host
        at = bisect_right(residuals, state.residual)
        if at and hosts[at - 1] <= host:
            continue
        kept.append(state)
        worse = at
        while worse < len(hosts) and hosts[worse] >= host:
            worse += 1
        residuals[at:worse], hosts[at:worse] = [state.residual], [host]
    return kept
