"""Lower bounds that need no search: no device is faster than its work, no micro-batch than its way there and back, and
memory is held for a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import ceil, inf

import numpy as np

from optpipe.evaluate.objective import Objective
from optpipe.model.arrays import Flags, Floats
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.records import Stage
from optpipe_solver.floor import part_bytes, without_evictions


def trivial_bound(problem: Problem, objective: Objective = "makespan") -> float:
    """No schedule of the problem is shorter, in ms, whatever the memory.

    Makespan: a device starts when the first forward can have reached it, then has all its work to do; or all but the
    weight gradients, and its last input gradient goes the way back. Span (OptPipe Eq. 3): a device's work, or one
    micro-batch's way from it and back.
    """
    ways, ms = _ways(problem), _shortest(problem)
    whole, inputs = _work(problem, (Kind.B, Kind.W))[ways.used], _work(problem, (Kind.B,))[ways.used]
    if objective == "span":
        return float(max(max(turn + ms[Kind.W, s] for (_, s), turn in ways.turn.items()), whole.max()))
    arrives, leaves = ways.arrives[ways.used], ways.leaves[ways.used]
    return float(max(ways.longest, (arrives + np.maximum(whole, inputs + leaves)).max()))


def memory_bound(problem: Problem, objective: Objective = "makespan") -> float:
    """No schedule that fits is shorter, in ms: what a device holds, summed up over time, fits into its memory times its
    time.

    An activation that stays is held from its forward to its backward; one that leaves is held less, but keeps the link
    busy; one that is recomputed keeps the device busy. For a device that runs for T ms, T of memory, T of link and T of
    compute have to suffice. Any weights of these three, adding up to one, give a bound: T is at least the weighted cost
    of the cheapest choice for every activation.

    Bytes do not fill memory as water does: of three activations of 10 and a memory of 38 the last 8 are of no use to a
    fourth. So sizes are measured by dual feasible functions f (Fekete and Schepers 2001): whatever fits into the memory
    at once has values that add up to at most 1, hence the values of all that is held, summed up over time, add up to at
    most T. f(x) = x / memory is one of them. What cannot be in use right after the start and right before the end comes
    on top (`_unused`). A makespan has the `deferral_bound`, too.
    """
    problem = without_evictions(problem)
    ways, ms = _ways(problem), _shortest(problem)
    work = _work(problem, (Kind.B, Kind.W))
    passing = np.bincount(problem.costs.route, minlength=len(problem.all_routes)).tolist()
    own: list[list[tuple[int, int]]] = [[] for _ in problem.devices]
    for r, s in ways.turn:
        own[problem.stages[s].device].append((r, s))
    bounds = [deferral_bound(problem) if objective == "makespan" else 0.0]
    for d in np.flatnonzero(ways.used).tolist():
        weight = _Weights.all()
        stages = [problem.stages[s] for _, s in own[d]]
        for measure in _measures(problem.devices[d].activation_budget_bytes, stages):
            needed = work[d] * weight.compute
            for r, s in own[d]:
                needed = needed + passing[r] * _cheapest(problem, s, ms[:, s], ways.turn[r, s], measure, weight)
            unused = _unused(
                measure,
                [(stage, ms[:, s]) for stage, (_, s) in zip(stages, own[d], strict=True)],
                float(needed.max()) / 2,
            )
            longest = float((needed + unused * weight.memory).max())
            bounds.append(longest + (float(ways.arrives[d]) if objective == "makespan" else 0.0))
    return max(bounds)


def _cheapest(problem: Problem, s: int, ms: Floats, turn: float, measure: Measure, weight: _Weights) -> Floats:
    """The least weighted cost of one activation: of what it holds from its forward to the end of its weight gradient,
    of the link's time and of computing it again.

    It is whole during its forward and its backward. In between, of one that leaves in part what stays and each part
    during its own transfers are worth no more one by one than together, as f is superadditive.
    """
    stage = problem.stages[s]
    size, ends = stage.activation_bytes, float(ms[Kind.F] + ms[Kind.B])
    between = max(0.0, turn - ends)
    whole, memory = measure(size), weight.memory
    cheapest: Floats = memory * whole * turn
    if stage.can_offload:
        carry = float(ms[Kind.O] + ms[Kind.R])
        duplex = (
            1.0 if problem.transfer_mode == "half_duplex" else 0.5
        )  # full duplex: two links' time, each the busier one's at least
        parts = sorted(part_bytes(stage), reverse=True)
        for n, gone in enumerate(accumulate(parts), start=1):
            held = whole * ends + measure(size - gone) * max(between, carry) + n * measure(parts[-1]) * carry
            cheapest = np.minimum(cheapest, memory * held + duplex * weight.link * n * carry)
    if stage.can_recompute:
        again = float(ms[Kind.C])
        held = whole * (ends + again) + measure(stage.checkpoint_bytes or 0) * max(0.0, between - again)
        cheapest = np.minimum(cheapest, memory * held + weight.compute * again)
    after: Floats = memory * measure(min(size, stage.saved_for_weight_bytes)) * float(ms[Kind.W])
    return cheapest + after


WEIGHTS = 40  # steps from none to all of the weight


@dataclass(frozen=True)
class _Weights:
    """All ways to split one over memory, link and compute, in steps."""

    memory: Floats
    link: Floats
    compute: Floats

    @classmethod
    @cache
    def all(cls) -> _Weights:
        points = [(a, b, WEIGHTS - a - b) for a in range(WEIGHTS + 1) for b in range(WEIGHTS + 1 - a)]
        return cls(*(np.array(points).T / WEIGHTS))


Measure = Callable[[int], float]
FINEST = 12  # of the dual feasible functions that are tried
MOST_STAGES = 256  # on a device, for more than one function


def _measures(memory: int, stages: list[Stage]) -> list[Measure]:
    """Bytes' share of the memory, and what else tells more for some of these sizes."""
    if not memory:
        return [lambda size: 0.0]

    def share(size: int) -> float:
        return size / memory

    def steps(k: int) -> Measure:
        return lambda size: share(size) if (k + 1) * size % memory == 0 else (k + 1) * size // memory / k

    sizes = {
        size
        for stage in stages
        for size in (stage.activation_bytes, stage.checkpoint_bytes or 0, stage.saved_for_weight_bytes)
    }
    found: dict[tuple[float, ...], Measure] = {tuple(map(share, sizes)): share}
    for k in range(1, FINEST + 1 if len(stages) <= MOST_STAGES else 1):
        measure = steps(k)
        if any(measure(size) > share(size) for size in sizes if size <= memory):
            found.setdefault(tuple(map(measure, sizes)), measure)
    return list(found.values())


def _unused(measure: Measure, stages: list[tuple[Stage, Floats]], within: float) -> float:
    """How much of a device's memory must stay unused at its start and at its end, each within so many ms; in ms of all
    of it.

    Forwards run one after the other: while the n-th runs, n activations are there at most. And whatever is held t ms
    before the end has its backward and weight gradient, or only the latter, still to run in that time, but for what is
    over of the one that runs.
    """
    largest = max(measure(max(stage.activation_bytes, stage.saved_for_weight_bytes)) for stage, _ in stages)
    first = min(float(ms[Kind.F]) for _, ms in stages)
    steps = min(ceil(1 / largest) - 1 if largest else 0, ceil(within / first) if first else 0)
    start = sum((1 - n * largest) * min(first, within - (n - 1) * first) for n in range(1, steps + 1))
    rate, over = 0.0, 0.0  # of the memory, what a ms of compute can free; and ms that may have passed already
    for stage, ms in stages:
        weights, both = float(ms[Kind.W]), float(ms[Kind.B] + ms[Kind.W])
        for held, lasts in (
            (stage.saved_for_weight_bytes, weights),
            (max(stage.activation_bytes, stage.saved_for_weight_bytes), both),
        ):
            rate = max(rate, measure(held) / lasts if lasts else inf if measure(held) else 0.0)
        over = max(over, both)
    emptying = min(within, 1 / rate - over) if rate else 0.0
    return start + max(0.0, emptying * (1 - rate * over) - rate * emptying**2 / 2 if emptying > 0 else 0.0)


def deferral_bound(problem: Problem) -> float:
    """No schedule that fits ends earlier, in ms: before a stage's last input gradient, memory lets only so much of
    other work wait.

    When the last B of stage s runs, its device has behind it all forwards and input gradients of s and of what follows
    s there, the forwards of what comes before s, and of the weight gradients all but its own and those that wait. Each
    that waits holds `saved_for_weight_bytes` beside the activation of s. So the end is no sooner than the first arrival
    at the device, this work with as much weight gradient left out as memory can hold (a fractional knapsack), and the
    way from s back to the beginning.
    """
    costs, ms = problem.costs, _shortest(problem)
    ways = _ways(problem)
    passing = np.bincount(costs.route, minlength=len(problem.all_routes))
    bound = 0.0
    for s, stage in enumerate(problem.stages):
        d = int(costs.device[s])
        routes = [r for r in range(len(passing)) if passing[r] and s in problem.all_routes[r]]
        done = -ms[Kind.W, s]
        weights: list[tuple[float, int, int]] = []  # ms of one weight gradient, its bytes, how many
        for r in routes:
            route, m = problem.all_routes[r], int(passing[r])
            at = route.index(s)
            for k, other in enumerate(route):
                if costs.device[other] == d:
                    done += m * (ms[Kind.F, other] + (ms[[Kind.B, Kind.W], other].sum() if k >= at else 0.0))
                    if k >= at:
                        weights.append((ms[Kind.W, other], problem.stages[other].saved_for_weight_bytes, m))
        waiting = _heaviest(weights, int(costs.activation_budget[d]) - stage.activation_bytes)
        way_back = min((ways.after[r, s] for r in routes), default=0.0)
        bound = max(bound, ways.arrives[d] + done - waiting + way_back) if routes else bound
    return float(bound)


def _heaviest(weights: list[tuple[float, int, int]], room: int) -> float:
    """The most ms of weight gradients whose bytes fit together; the last may be taken in part."""
    total = 0.0
    for ms, size, count in sorted(weights, key=lambda weight: -weight[0] / max(weight[1], 1e-9)):
        taken = min(count, max(0, room) / size) if size else count
        total += taken * ms
        room -= int(np.ceil(taken * size))
    return total


@dataclass(frozen=True)
class _Ways:
    used: Flags  # (D,) devices that some micro-batch passes
    arrives: Floats  # (D,) the soonest that a forward reaches each device
    leaves: Floats  # (D,) the least time from its last input gradient to the end
    turn: dict[
        tuple[int, int], float
    ]  # by route and stage: the least time from a forward's start to its input gradient's end
    after: dict[
        tuple[int, int], float
    ]  # by route and stage: the least time from its input gradient's end to the end of all
    longest: float  # the least time for one micro-batch's whole way


def _shortest(problem: Problem) -> Floats:
    """(len(Kind), S) the least time that can be put down to each op: of a pair's time its share, W as a part of a
    paired BW."""
    ms = problem.costs.ms.copy()
    ms[[Kind.F, Kind.B, Kind.W]] *= problem.overlap_factor or 1.0
    return ms


def _ways(problem: Problem) -> _Ways:
    device, ms = problem.costs.device, _shortest(problem)
    arrives = np.full(len(problem.devices), np.inf)
    leaves = arrives.copy()
    turn: dict[tuple[int, int], float] = {}
    after: dict[tuple[int, int], float] = {}
    longest = 0.0
    for r in sorted(set(problem.costs.route.tolist())):
        route = problem.all_routes[r]
        hop = [problem.p2p_ms if device[a] != device[b] else 0.0 for a, b in pairwise(route)]
        on = list(accumulate((ms[Kind.F, s] + h for s, h in zip(route, hop, strict=False)), initial=0.0))
        back = list(accumulate((ms[Kind.B, s] + h for s, h in zip(route, hop, strict=False)), initial=0.0))
        last = ms[Kind.F, route[-1]] + ms[Kind.B, route[-1]]
        rest = 0.0  # after the input gradient of a stage: its weight gradient, or the way back
        for k, s in enumerate(route):
            rest = max(ms[Kind.W, s], rest + (back[k] - back[k - 1] if k else 0.0))
            arrives[device[s]] = min(arrives[device[s]], on[k])
            leaves[device[s]] = min(leaves[device[s]], rest)
            after[r, s] = rest
            turn[r, s] = on[-1] - on[k] + last + back[-1] - back[k]
        longest = max(longest, on[-1] + last + rest)
    return _Ways(np.isfinite(arrives), arrives, leaves, turn, after, longest)


def _work(problem: Problem, backward: tuple[Kind, ...]) -> Floats:
    """(D,) the least compute time of each device's forwards and these parts of its backwards.

    In pairs they take `overlap_factor` of their time, but for a device's first forward and last backward: no backward
    can come before that forward, no forward after that backward.
    """
    costs, factor = problem.costs, problem.overlap_factor or 1.0
    passes = (costs.before[costs.route] != -2).sum(axis=0)  # (S,) micro-batches
    forward, gradient = costs.ms[Kind.F], costs.ms[list(backward)].sum(axis=0)
    work = np.zeros(len(problem.devices))
    np.add.at(work, costs.device, factor * passes * (forward + gradient))
    for d in range(len(work)):
        own = (costs.device == d) & (passes > 0)
        work[d] += (
            (1 - factor) * (forward[own].min(initial=np.inf) + gradient[own].min(initial=np.inf)) if own.any() else 0.0
        )
    return work
