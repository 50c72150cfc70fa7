"""The least times on the paths of micro-batches through all stages and back."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from optpipe.model.arrays import Flags, Floats
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem


class Paths(NamedTuple):
    """The least times in ms on the paths of micro-batches; dictionaries by route and stage."""

    used: Flags  # (D,) devices that some micro-batch passes
    arrives: Floats  # (D,) until a forward reaches each device
    leaves: Floats  # (D,) from its last input gradient to the end
    returns: Floats  # (D,) from its last input gradient to the end of that micro-batch's first stage
    reaches: dict[tuple[int, int], float]  # until a forward reaches the stage
    round_trip: dict[tuple[int, int], float]  # from a forward's start to its input gradient's end
    after: dict[tuple[int, int], float]  # from an input gradient's end to the end of all
    back: dict[tuple[int, int], float]  # from an input gradient's end to the end of the first stage
    one_entry: bool  # whether all routes begin on one device
    longest: float  # of one micro-batch through all stages and back


def shortest_times(problem: Problem) -> Floats:
    """Return (len(Kind), S) the least time of each op: of a pair its share, where W may be a part of a paired BW."""
    ms = problem.costs.ms.copy()
    ms[[Kind.F, Kind.B, Kind.W]] *= problem.overlap_factor or 1.0
    return ms


def shortest_paths(problem: Problem) -> Paths:
    device, ms = problem.costs.device, shortest_times(problem)
    arrives = np.full(len(problem.devices), np.inf)
    leaves, returns = arrives.copy(), arrives.copy()
    reaches: dict[tuple[int, int], float] = {}
    round_trip: dict[tuple[int, int], float] = {}
    after: dict[tuple[int, int], float] = {}
    home: dict[tuple[int, int], float] = {}
    longest = 0.0
    used = sorted(set(problem.costs.route.tolist()))
    one_entry = len({int(device[problem.all_routes[r][0]]) for r in used}) == 1
    for r in used:
        route = problem.all_routes[r]
        hop = [problem.p2p_ms if device[a] != device[b] else 0.0 for a, b in pairwise(route)]
        on = list(accumulate((ms[Kind.F, s] + h for s, h in zip(route, hop, strict=False)), initial=0.0))
        back = list(accumulate((ms[Kind.B, s] + h for s, h in zip(route, hop, strict=False)), initial=0.0))
        last = ms[Kind.F, route[-1]] + ms[Kind.B, route[-1]]
        rest = 0.0  # after the input gradient of a stage: its weight gradient, or the path back
        for k, s in enumerate(route):
            rest = max(ms[Kind.W, s], rest + (back[k] - back[k - 1] if k else 0.0))
            arrives[device[s]] = min(arrives[device[s]], on[k])
            leaves[device[s]] = min(leaves[device[s]], rest)
            reaches[r, s] = on[k]
            after[r, s] = rest
            home[r, s] = back[k] + ms[Kind.W, route[0]]
            returns[device[s]] = min(returns[device[s]], home[r, s])
            round_trip[r, s] = on[-1] - on[k] + last + back[-1] - back[k]
        longest = max(longest, on[-1] + last + rest)
    return Paths(np.isfinite(arrives), arrives, leaves, returns, reaches, round_trip, after, home, one_entry, longest)
