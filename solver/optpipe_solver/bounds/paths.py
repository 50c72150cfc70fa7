"""The least times on the paths of micro-batches through all stages and back."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from optpipe.model.arrays import Flags, Floats
from optpipe.model.costs import FORWARDS, GRADIENTS
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem

Pass = tuple[int, int]  # the first micro-batch of a class of equal ones, and a stage


class Paths(NamedTuple):
    """The least times in ms on the paths of micro-batches; by the first micro-batch of each class of equal ones, or by
    `Pass`."""

    passing: dict[int, int]  # how many micro-batches each class has
    ms: dict[int, Floats]  # `shortest_times` of each class
    passes: list[list[Pass]]  # of each device
    used: Flags  # (D,) devices that some micro-batch passes
    arrives: Floats  # (D,) until a forward reaches each device
    leaves: Floats  # (D,) from its last input gradient to the end
    returns: Floats  # (D,) from its last input gradient to the end of that micro-batch's first stage
    reaches: dict[Pass, float]  # until a forward reaches the stage
    round_trip: dict[Pass, float]  # from a forward's start to its input gradient's end
    after: dict[Pass, float]  # from an input gradient's end to the end of all
    back: dict[Pass, float]  # from an input gradient's end to the end of the first stage
    one_entry: bool  # whether all routes begin on one device


def shortest_times(problem: Problem, microbatch: int) -> Floats:
    """Return (len(Kind), S) the least time of a micro-batch's ops: of a pair its share, where W may be a part of a
    paired BW."""
    ms = problem.costs.ms[..., microbatch].copy()
    ms[[Kind.F, Kind.B, Kind.W]] *= problem.overlap_factor or 1.0
    return ms


def shortest_paths(problem: Problem) -> Paths:
    costs = problem.costs
    device, examples = costs.device, costs.representatives.tolist()
    arrives = np.full(len(problem.devices), np.inf)
    leaves, returns = arrives.copy(), arrives.copy()
    reaches: dict[Pass, float] = {}
    round_trip: dict[Pass, float] = {}
    after: dict[Pass, float] = {}
    home: dict[Pass, float] = {}
    passes: list[list[Pass]] = [[] for _ in problem.devices]
    times = {j: shortest_times(problem, j) for j in examples}
    one_entry = len({int(device[problem.route(j)[0]]) for j in examples}) == 1
    for j in examples:
        route, ms = problem.route(j), times[j]
        there_ms, back_ms = (costs.message_ms[way, :, j].tolist() for way in (FORWARDS, GRADIENTS))
        on = list(accumulate((ms[Kind.F, a] + there_ms[b] for a, b in pairwise(route)), initial=0.0))
        back = list(accumulate((ms[Kind.B, a] + back_ms[a] for a in route[:-1]), initial=0.0))
        last = ms[Kind.F, route[-1]] + ms[Kind.B, route[-1]]
        rest = 0.0  # after the input gradient of a stage: its weight gradient, or the path back
        for k, s in enumerate(route):
            rest = max(ms[Kind.W, s], rest + (back[k] - back[k - 1] if k else 0.0))
            arrives[device[s]] = min(arrives[device[s]], on[k])
            leaves[device[s]] = min(leaves[device[s]], rest)
            reaches[j, s] = on[k]
            after[j, s] = rest
            home[j, s] = back[k] + ms[Kind.W, route[0]]
            returns[device[s]] = min(returns[device[s]], home[j, s])
            round_trip[j, s] = on[-1] - on[k] + last + back[-1] - back[k]
            passes[device[s]].append((j, s))
    passing = dict(zip(examples, np.bincount(costs.class_of).tolist(), strict=True))
    used = np.isfinite(arrives)
    return Paths(passing, times, passes, used, arrives, leaves, returns, reaches, round_trip, after, home, one_entry)
