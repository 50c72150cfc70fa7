"""Lower bounds that need no search: no device is faster than its work, no micro-batch than its way there and back, and memory is held
for a time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from optpipe.child import Objective
from optpipe.graph import Flags, Floats
from optpipe.ops import Kind
from optpipe.problem import Problem
from optpipe_solver.floor import part_bytes


def trivial_bound(problem: Problem, objective: Objective = "makespan") -> float:
    """No schedule of the problem is shorter, in ms, whatever the memory.

    Makespan: a device starts when the first forward can have reached it, then has all its work to do; or all but the weight gradients,
    and its last input gradient goes the way back. Span (OptPipe Eq. 3): a device's work, or one micro-batch's way from it and back.
    """
    ways, ms = _ways(problem), _shortest(problem)
    whole, inputs = _work(problem, (Kind.B, Kind.W))[ways.used], _work(problem, (Kind.B,))[ways.used]
    if objective == "span":
        return float(max(max(turn + ms[Kind.W, s] for (_, s), turn in ways.turn.items()), whole.max()))
    arrives, leaves = ways.arrives[ways.used], ways.leaves[ways.used]
    return float(max(ways.longest, (arrives + np.maximum(whole, inputs + leaves)).max()))


def memory_bound(problem: Problem, objective: Objective = "makespan") -> float:
    """No schedule that fits is shorter, in ms: what a device holds, summed up over time, fits into its memory times its time.

    An activation that stays is held from its forward to its backward; one that leaves is held less, but keeps the link busy; one that is
    recomputed keeps the device busy. For a device that runs for T ms, memory · T, T of link and T of compute have to suffice. Any weights
    of these three, adding up to one, give a bound: T is at least the weighted cost of the cheapest choice for every activation. A makespan
    has the `deferral_bound`, too.
    """
    ways, ms, costs = _ways(problem), _shortest(problem), problem.costs
    memory, link, compute = (np.array(w) / WEIGHTS for w in _simplex())
    passing = np.bincount(costs.route, minlength=len(problem.all_routes))
    least = np.zeros((len(problem.devices), len(memory)))
    work = _work(problem, (Kind.B, Kind.W))
    least += work[:, None] * compute
    for (r, s), turn in ways.turn.items():
        stage, d = problem.stages[s], costs.device[s]
        price = memory / max(1, costs.memory[d])  # of a byte held for a ms
        ends = ms[Kind.F, s] + ms[Kind.B, s]
        carry = ms[Kind.O, s] + ms[Kind.R, s]
        duplex = 1.0 if problem.transfer_mode == "half_duplex" else 0.5  # full duplex: two links' time, each the busier one's at least
        cheapest = price * stage.activation_bytes * turn
        if stage.can_offload:
            for size in part_bytes(stage):
                cheapest = cheapest + np.minimum(0.0, price * size * (ends + carry - turn) + duplex * link * carry)
        if stage.can_recompute:
            kept = stage.checkpoint_bytes or 0
            again = ms[Kind.C, s]
            held = kept * turn + (stage.activation_bytes - kept) * (ends + again)
            cheapest = np.minimum(cheapest, price * held + compute * again)
        after = price * min(stage.activation_bytes, stage.weight_grad_bytes) * ms[Kind.W, s]
        least[d] += passing[r] * (cheapest + after)
    needed = least.max(axis=1)[ways.used]
    if objective == "span":
        return float(needed.max())
    return max(float((needed + ways.arrives[ways.used]).max()), deferral_bound(problem))


def deferral_bound(problem: Problem) -> float:
    """No schedule that fits ends earlier, in ms: before a stage's last input gradient, memory lets only so much of other work wait.

    When the last B of stage s runs, its device has behind it all forwards and input gradients of s and of what follows s there, the
    forwards of what comes before s, and of the weight gradients all but its own and those that wait. Each that waits holds
    `weight_grad_bytes` beside the activation of s. So the end is no sooner than the first arrival at the device, this work with as much
    weight gradient left out as memory can hold (a fractional knapsack), and the way from s back to the beginning.
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
                        weights.append((ms[Kind.W, other], problem.stages[other].weight_grad_bytes, m))
        waiting = _heaviest(weights, int(costs.memory[d]) - stage.activation_bytes)
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


WEIGHTS = 40  # steps from none to all of the weight


def _simplex() -> tuple[list[int], list[int], list[int]]:
    """All ways to split `WEIGHTS` over three."""
    points = [(a, b, WEIGHTS - a - b) for a in range(WEIGHTS + 1) for b in range(WEIGHTS + 1 - a)]
    first, second, third = zip(*points, strict=True)
    return list(first), list(second), list(third)


@dataclass(frozen=True)
class _Ways:
    used: Flags  # (D,) devices that some micro-batch passes
    arrives: Floats  # (D,) the soonest that a forward reaches each device
    leaves: Floats  # (D,) the least time from its last input gradient to the end
    turn: dict[tuple[int, int], float]  # by route and stage: the least time from a forward's start to its input gradient's end
    after: dict[tuple[int, int], float]  # by route and stage: the least time from its input gradient's end to the end of all
    longest: float  # the least time for one micro-batch's whole way


def _shortest(problem: Problem) -> Floats:
    """(len(Kind), S) the least time that can be put down to each op: of a pair's time its share, W as a part of a paired BW."""
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

    In pairs they take `overlap_factor` of their time, but for a device's first forward and last backward: no backward can come before
    that forward, no forward after that backward.
    """
    costs, factor = problem.costs, problem.overlap_factor or 1.0
    passes = (costs.before[costs.route] != -2).sum(axis=0)  # (S,) micro-batches
    forward, gradient = costs.ms[Kind.F], costs.ms[list(backward)].sum(axis=0)
    work = np.zeros(len(problem.devices))
    np.add.at(work, costs.device, factor * passes * (forward + gradient))
    for d in range(len(work)):
        own = (costs.device == d) & (passes > 0)
        work[d] += (1 - factor) * (forward[own].min(initial=np.inf) + gradient[own].min(initial=np.inf)) if own.any() else 0.0
    return work
