"""Lower bounds on the length of a schedule that need no search.

No device is faster than its work, no micro-batch faster than its path through all stages and back, and memory is held
for a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from itertools import accumulate
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from optpipe.evaluate.objective import Objective
from optpipe.model.arrays import OFF_ROUTE, Floats
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe_solver import tuning
from optpipe_solver.bounds.problem_facts import Pass, Paths, StageBytes, shortest_paths, stage_bytes
from optpipe_solver.bounds.ramp import ramp_bound

MEMORY, LINK, COMPUTE = range(3)  # columns of what a choice costs


def lower_bound(problem: Problem, objective: Objective = "makespan") -> float:
    """Return the best bound in ms that needs no search, of `trivial_bound`, `memory_bound` and `ramp_bound`."""
    return max(bound(problem, objective) for bound in (trivial_bound, memory_bound, ramp_bound))


class _Ops(NamedTuple):
    """All ops of one kind and stage of equal micro-batches: ms of all together, and at least before and after each."""

    ms: float
    before: float
    after: float


def trivial_bound(problem: Problem, objective: Objective = "makespan") -> float:
    """Return a length in ms that no schedule of the problem falls below, whatever the memory, from each device alone.

    A device computes one op at a time. So for any set of its ops, a schedule takes at least the least time before one
    of them, the time of all, and the least time after one of them (Carlier 1982, "The one-machine sequencing problem").
    Where ops run in pairs, a device's first forward and last backward still run alone, which counts for those sets of
    its ops that hold all forwards and all input gradients.

    Makespan: what comes before and after an op is on any device. Span (OptPipe Eq. 3): it is between the first op of
    the op's device and its last one. Where all micro-batches enter on one device, that device starts at 0, so its span
    is its end, and waits for the last input gradient of every other one.
    """
    paths = shortest_paths(problem)

    def ops(at: Pass, begin: float, after: float) -> list[_Ops]:
        """Of one pass: forwards, input gradients, weight gradients; `after` input gradients."""
        j, s = at
        forward, backward, weight = (float(paths.ms[j][kind, s]) for kind in (Kind.F, Kind.B, Kind.W))
        count, arrives, trip = paths.passing[j], paths.reaches[at] - begin, paths.round_trip[at]
        return [
            _Ops(count * forward, arrives, trip - forward + after),
            _Ops(count * backward, arrives + trip - backward, after),
            _Ops(count * weight, arrives + trip, 0.0),
        ]

    longest = 0.0
    for each in filter(None, paths.passes):
        if objective == "makespan":
            longest = max(longest, _longest([op for at in each for op in ops(at, 0.0, paths.after[at])]))
            continue
        first = {j: (j, s) for j, s in sorted(each, key=lambda at: -paths.reaches[at])}  # of each class
        between = [op for at in each for op in ops(at, paths.reaches[first[at[0]]], _to_last_op(at, first, paths))]
        longest = max(longest, _longest(between))
        if paths.one_entry:
            longest = max(longest, _longest([op for at in each for op in ops(at, 0.0, paths.back[at])[:2]]))
    if problem.overlap_factor is None:
        return longest
    whole, inputs = _work(problem, (Kind.B, Kind.W))[paths.used], _work(problem, (Kind.B,))[paths.used]
    arrives, leaves, returns = (each[paths.used] for each in (paths.arrives, paths.leaves, paths.returns))
    if objective == "span":
        return float(max(longest, whole.max(), (arrives + inputs + returns).max() if paths.one_entry else 0.0))
    return float(max(longest, (arrives + np.maximum(whole, inputs + leaves)).max()))


def _to_last_op(at: Pass, first: Mapping[int, Pass], paths: Paths) -> float:
    """Return the least ms from an input gradient's end to the end of its device's last op: its own weight gradient, or
    the way back to the first pass of the device, and the weight gradient there."""
    j, s = at
    ms, start = paths.ms[j], first[j]
    ends, returns = (paths.reaches[each] + paths.round_trip[each] for each in (at, start))
    return float(max(ms[Kind.W, s], returns - ends + ms[Kind.W, start[1]]))


def _longest(ops: list[_Ops]) -> float:
    """Return the largest bound of all sets of these ops: the best has all with at least so much before and after."""
    ms, before, after = np.array(sorted(ops, key=lambda op: -op.after)).T
    chosen = before >= before[:, None]  # (least before, op)
    bounds = before[:, None] + np.cumsum(ms * chosen, axis=1) + after
    return float(bounds[chosen].max())


def memory_bound(problem: Problem, objective: Objective = "makespan") -> float:
    """Return a length in ms that no schedule that fits falls below.

    What a device holds, summed over time, fits into its memory times its time. An activation that stays is held from
    its forward to its backward; one that leaves is held less, but keeps a link busy; one that is recomputed keeps the
    device busy. For a device that runs for T ms, T of memory, T of each link and T of compute have to suffice. Any
    weights of these three, adding up to one, give a bound: T is at least the weighted cost of the cheapest choice for
    every activation.

    What is evicted is held by the peer. So devices that evict to none but each other are looked at together, too, as
    one with the memory of all, where an eviction saves nothing. That bounds no span, as they begin at different times.

    Bytes do not fill memory as water does: of three activations of 10 and a memory of 38 the last 8 are of no use to a
    fourth. So sizes are measured by dual feasible functions f (Fekete and Schepers 2001): whatever fits into the memory
    at once has values that add up to at most 1, hence the values of all that is held, summed over time, add up to at
    most T. f(x) = x / memory is one of them. Where one op runs at a time, and f is 0 of all that fits beside what an op
    holds while it runs, that may count as 1: a weight gradient keeps activations away for which it leaves no room. What
    cannot be in use right after the start and right before the end is added (`_unused`) or, after the last input
    gradient, the way back less the weight gradients that memory lets wait until then. The `deferral_bound` holds as
    well, and alone where more micro-batches differ than can be looked at.
    """
    paths, work = shortest_paths(problem), _work(problem, (Kind.B, Kind.W))
    bounds = [deferral_bound(problem, objective)]
    if len(paths.round_trip) > tuning.MEMORY_BOUND_PASSES:
        return bounds[0]
    held = {j: stage_bytes(problem, j) for j in paths.passing}
    weights = _weights()
    together = {_peers(problem, d) for d in np.flatnonzero(paths.used).tolist()} if objective == "makespan" else set()
    for devices in {*together, *((d,) for d in np.flatnonzero(paths.used).tolist())}:
        n, passes = len(devices), [at for d in devices for at in paths.passes[d]]
        stages = [(held[j][s], paths.ms[j][:, s]) for j, s in passes]
        memory = sum(problem.devices[d].activation_budget_bytes for d in devices)
        alone = n == 1 and problem.overlap_factor is None and not problem.costs.can_evict.any()
        for measured in measures(memory, [each for each, _ in stages], alone):
            needed = work[list(devices)].sum() / n * weights[COMPUTE]  # in steps: whole numbers have no noise
            for (j, s), (stage_held, ms) in zip(passes, stages, strict=True):
                costs = _choice_costs(problem, s, j, stage_held, ms, paths.round_trip[j, s], measured, n)
                needed = needed + paths.passing[j] * (costs @ weights).min(axis=0)
            least = float(needed.max()) / tuning.WEIGHT_STEPS
            unused = _unused(measured.running, stages, least / 2) if n == 1 else 0.0
            longest = float((needed + unused * weights[MEMORY]).max()) / tuning.WEIGHT_STEPS
            arrives = float(paths.arrives[list(devices)].min()) if objective == "makespan" else 0.0
            bounds.append(arrives + longest)
            if alone and objective == "makespan":
                waiting = [(float(paths.ms[j][Kind.W, s]), held[j][s].waiting, paths.passing[j]) for j, s in passes]
                left = max(waiting)[0] + _deferred(waiting, memory - min(held[j][s].backward for j, s in passes))
                bounds.append(arrives + least - left + min(paths.after[at] for at in passes))
    return max(bounds)


def _peers(problem: Problem, device: int) -> tuple[int, ...]:
    """Return a device, and those that may hold what it evicts and what they evict."""
    found, evicting = [device], set(problem.costs.device[problem.costs.can_evict].tolist())
    while found[-1] in evicting and (peer := int(problem.costs.peer[found[-1]])) not in found:
        found.append(peer)
    return tuple(sorted(found))


def _choice_costs(
    problem: Problem, s: int, j: int, held: StageBytes, ms: Floats, trip: float, by: Measures, devices: int
) -> Floats:
    """Return (choices, 3) what becomes of one activation, and its cost: ms of all memory, of the links, of compute.

    It is what the activation holds from its forward to the end of its weight gradient, the link's time and that of
    computing it again by each level. Its parts, or those of the level's checkpoint, leave one after the other and come
    back so: while the n-th of them moves, all but n - 1 are there. Links of two ways may carry them there and back at
    once. Then fewer are away at a time, which is the choice of those only; each way counts half. So does each of two
    links where a device has one to its peer, too. Of several devices each has that much of links and compute.
    """
    stage, costs_of, (measure, running) = problem.stages[s], problem.costs, by
    here, offloads = costs_of.device == stage.device, costs_of.can_offload | costs_of.levels.can_offload.any(axis=0)
    evicts = devices == 1 and bool(costs_of.can_evict[here].any())
    links = devices * (1 + (evicts and bool(offloads[here].any())))
    between = max(0.0, trip - float(ms[Kind.F] + ms[Kind.B]))
    ends = running(held.forward) * float(ms[Kind.F]) + running(held.backward) * float(ms[Kind.B])
    ends += running(held.weight) * float(ms[Kind.W])
    # Bytes that wait for the backward, and of their parts that can leave; ms of a part's transfers; of a recompute the
    # bytes and ms: of the whole activation, and of the checkpoint of each level. Last, of what is evicted.
    ways = [(held.stays, held.parts, float(ms[Kind.O]) + float(ms[Kind.R]), 0, 0.0)]
    levels = costs_of.levels
    for k, level in enumerate(held.levels):
        out, back, again = (float(x[k, s, j]) for x in (levels.offload_ms, levels.reload_ms, levels.recompute_ms))
        ways.append((level.checkpoint, level.parts, out + back, level.recompute, again))
    if evicts and stage.can_evict:
        ways.append((held.stays, [int(costs_of.evict[s, j])], float(ms[Kind.E]) + float(ms[Kind.L]), 0, 0.0))
    costs = []
    for way, (stays, parts, moved_ms, recompute_bytes, recompute_ms) in enumerate(ways):
        computed, rest = running(recompute_bytes) * recompute_ms, max(0.0, between - recompute_ms)
        one_way = problem.transfer_mode == "half_duplex" or way > len(held.levels)
        busy = moved_ms * (1.0 if one_way else 0.5) / links
        there = [measure(stays - size) for size in accumulate(sorted(parts, reverse=True), initial=0)]
        for n in range(len(there)):
            area = ends + computed + sum(there[:n]) * moved_ms + there[n] * max(0.0, rest - n * moved_ms)
            costs.append((area, n * busy, recompute_ms / devices))
    return np.array(costs)


@cache
def _weights() -> Floats:
    """Return (3, ways) all ways to split `tuning.WEIGHT_STEPS` over memory, link and compute."""
    n = tuning.WEIGHT_STEPS
    return np.array([(a, b, n - a - b) for a in range(n + 1) for b in range(n + 1 - a)], dtype=float).T


Measure = Callable[[int], float]


class Measures(NamedTuple):
    """Values of bytes of which all that is held at once has 1 at most."""

    held: Measure
    running: Measure  # while an op of the activation runs: the same, or 1 where nothing that counts fits beside it


def measures(memory: int, stages: list[StageBytes], alone: bool = False) -> list[Measures]:
    """Return bytes' share of the memory, and the dual feasible functions that give more for some of these sizes, or for
    what runs, where ops run `alone`."""
    if not memory:
        return [Measures(lambda size: 0.0, lambda size: 0.0)]
    sizes = {size for held in stages for size in (held.stays, held.waiting, *(x.checkpoint for x in held.levels))}
    counted = {size for held in stages for size in held.counted()}
    share = _steps(memory, 0)
    by_values = {tuple(map(share, sizes)): Measures(share, share)}
    for k in range(1, tuning.MEASURES + 1 if len(stages) <= tuning.MEASURE_STAGES else 1):
        measure = _steps(memory, k)
        if any(measure(size) > share(size) for size in sizes if size <= memory):
            by_values.setdefault(tuple(map(measure, sizes)), Measures(measure, measure))
        room = memory - min((size for size in counted if measure(size)), default=memory)
        if alone and any(size > room and measure(size) < 1 for size in counted):
            by_values.setdefault((room,), Measures(measure, _steps(memory, k, room)))
    return list(by_values.values())


def _steps(memory: int, k: int, room: float = inf) -> Measure:
    """Return u^(k) of Fekete and Schepers: shares of memory, rounded down to multiples of 1 / k, of 0 as they are. More
    than `room` counts as 1."""

    def value(size: int) -> float:
        exact = not k or (k + 1) * size % memory == 0
        return 1.0 if size > room else size / memory if exact else (k + 1) * size // memory / k

    return value


def _unused(measure: Measure, stages: list[tuple[StageBytes, Floats]], within: float) -> float:
    """Return how much of a device's memory must stay unused at its start and its end, in ms of all of it.

    Start and end last `within` ms each. Forwards run one after the other: while the n-th runs, there are n activations
    at most. And what is held t ms before the end has its backward and weight gradient, or only the latter, still to run
    in that time, except for the part of the running op that is over.
    """
    largest = max(measure(held.most) for held, _ in stages)
    first = min(float(ms[Kind.F]) for _, ms in stages)
    steps = ceil(min(ceil(1 / largest) - 1, within / first)) if largest and first else 0
    # The sum over n = 1, 2, ... of (1 - n * largest) times how long the n-th forward lasts within this time.
    whole = steps if steps * first <= within else steps - 1
    start = first * (whole - largest * whole * (whole + 1) / 2)
    start += (1 - steps * largest) * (within - whole * first) if whole < steps else 0.0
    rate, over = 0.0, 0.0  # of the memory, what a ms of compute can free; and ms that may have passed already
    for held, ms in stages:
        weight, both = float(ms[Kind.W]), float(ms[Kind.B] + ms[Kind.W])
        for size, lasts in ((held.waiting_peak, weight), (held.most, both)):
            rate = max(rate, measure(size) / lasts if lasts else inf if measure(size) else 0.0)
        over = max(over, both)
    emptying = min(within, 1 / rate - over) if rate else 0.0
    return start + max(0.0, emptying * (1 - rate * over) - rate * emptying**2 / 2 if emptying > 0 else 0.0)


def deferral_bound(problem: Problem, objective: Objective = "makespan") -> float:
    """Return a length in ms that no schedule that fits falls below.

    Memory lets only so much work wait for a stage's last input gradient. When the last B of stage s runs, its device
    has done all forwards and input gradients of s and of what follows s there, the forwards of what comes before s, and
    all weight gradients but its own and those that wait. Each that waits holds what stays saved for it beside the
    activation of s. So the end is no sooner than the first arrival at the device, plus this work with as much weight
    gradient left out as memory can hold (a fractional knapsack), plus the path from s back to the first stage. That
    is a bound on the span, too, where the first stage's device starts at 0; elsewhere there is none, 0.
    """
    costs, paths = problem.costs, shortest_paths(problem)
    ms = paths.ms
    held = {j: stage_bytes(problem, j) for j in paths.passing}
    if objective == "span" and not paths.one_entry:
        return 0.0
    after = paths.after if objective == "makespan" else paths.back
    bound = 0.0
    for s in range(len(problem.stages)):
        d = int(costs.device[s])
        passing = [j for j in paths.passing if s in problem.route(j)]
        if not passing:
            continue
        done = -max(ms[j][Kind.W, s] for j in passing)
        waiting: list[tuple[float, int, int]] = []  # ms and bytes of a weight gradient that can wait; micro-batches
        for j in passing:
            route, count = problem.route(j), paths.passing[j]
            at = route.index(s)
            for k, other in enumerate(route):
                if costs.device[other] == d:
                    gradient_ms = ms[j][[Kind.B, Kind.W], other].sum() if k >= at else 0.0
                    done += count * (ms[j][Kind.F, other] + gradient_ms)
                    if k >= at:
                        waiting.append((ms[j][Kind.W, other], held[j][other].waiting, count))
        deferred = _deferred(waiting, int(costs.activation_budget[d]) - min(held[j][s].backward for j in passing))
        bound = max(bound, paths.arrives[d] + done - deferred + min(after[j, s] for j in passing))
    return float(bound)


def _deferred(waiting: list[tuple[float, int, int]], room: int) -> float:
    """Return the most ms of weight gradients whose bytes fit together; the last may be taken in part."""
    deferred = 0.0
    for each_ms, size, count in sorted(waiting, key=lambda each: -each[0] / max(each[1], 1e-9)):
        taken = min(count, max(0, room) / size) if size else count
        deferred += taken * each_ms
        room -= int(np.ceil(taken * size))
    return deferred


def _work(problem: Problem, backward: tuple[Kind, ...]) -> Floats:
    """Return (D,) the least compute time of each device's forwards and these parts of its backwards.

    In pairs they take the least factors of their time (`shortest_times`), but for a device's first forward and last
    backward: no backward can come before that forward, no forward after that backward.
    """
    costs, (of_forward, of_gradient) = problem.costs, (each[:, None] for each in problem.least_factors)
    examples = costs.representatives
    passes = (costs.before[costs.route[examples]] != OFF_ROUTE).T  # (S, classes)
    forward, gradient = costs.ms[Kind.F][:, examples], costs.ms[list(backward)][..., examples].sum(axis=0)
    work = np.zeros(len(problem.devices))
    least = of_forward * forward + of_gradient * gradient
    np.add.at(work, costs.device, (least * passes) @ np.bincount(costs.class_of))
    for d in range(len(work)):
        used = (costs.device == d)[:, None] & passes
        if used.any():
            alone = (1 - of_forward) * forward, (1 - of_gradient) * gradient
            work[d] += sum(ms[used].min() for ms in alone)
    return work
