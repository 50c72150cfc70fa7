"""A lower bound that needs no search: no device is faster than its work, no micro-batch faster than its way there and back."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np

from optpipe.child import Objective
from optpipe.graph import Floats
from optpipe.ops import Kind
from optpipe.problem import Problem
from optpipe_solver.floor import used_routes


def trivial_bound(problem: Problem, objective: Objective = "makespan") -> float:
    """No schedule of the problem is shorter, in ms, whatever the memory.

    Makespan: a device starts when the first forward can have reached it, then has all its work to do; or all but the weight gradients,
    and its last input gradient goes the way back. Span (OptPipe Eq. 3): a device's work, or one micro-batch's way from it and back.
    """
    costs, ms = problem.costs, problem.costs.ms.copy()
    ms[[Kind.F, Kind.B]] *= problem.overlap_factor or 1.0  # at least this share of a pair's time is each op's own
    arrives = np.full(len(problem.devices), np.inf)  # (D,) the soonest that a forward reaches each device
    leaves = np.full(len(problem.devices), np.inf)  # (D,) the least time from its last input gradient to the end
    there_and_back = [0.0]
    for route in used_routes(problem):
        hop = [problem.p2p_ms if costs.device[a] != costs.device[b] else 0.0 for a, b in pairwise(route)]
        on = list(accumulate((ms[Kind.F, s] + h for s, h in zip(route, hop, strict=False)), initial=0.0))
        back = list(accumulate((ms[Kind.B, s] + h for s, h in zip(route, hop, strict=False)), initial=0.0))
        last = ms[Kind.F, route[-1]] + ms[Kind.B, route[-1]]
        rest = 0.0  # after the input gradient of a stage: its weight gradient, or the way back
        for k, s in enumerate(route):
            rest = max(ms[Kind.W, s], rest + (back[k] - back[k - 1] if k else 0.0))
            arrives[costs.device[s]] = min(arrives[costs.device[s]], on[k])
            leaves[costs.device[s]] = min(leaves[costs.device[s]], rest)
            there_and_back.append(on[-1] - on[k] + last + back[-1] - back[k] + ms[Kind.W, s])
        if objective == "makespan":
            there_and_back.append(on[-1] + last + rest)
    runs = np.isfinite(arrives)
    whole, inputs = _work(problem, (Kind.B, Kind.W))[runs], _work(problem, (Kind.B,))[runs]
    if objective == "span":
        return float(max(*there_and_back, *whole))
    return float(max(*there_and_back, *(arrives[runs] + np.maximum(whole, inputs + leaves[runs]))))


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
