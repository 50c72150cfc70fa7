"""AdaOffload's tolerance (OptPipe, Algorithm 1): how many forwards a stage may start before its first backward."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

import numpy as np

from optpipe.evaluate.objective import TOLERANCE
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem


def tolerated_forwards(problem: Problem, tolerance_ms: float) -> tuple[int, ...]:
    """Count the forwards that each stage starts before its first backward, if they may delay it by T (steps 1 and 2).

    A forward starts if the one before has ended before EstStart(B_{s,0}) + T, where EstStart is the moment at which the
    backward could start if its micro-batch were alone. Forwards come at the pace of the slowest device on the way to
    the stage, with all of its stages. That a forward also waits for the offload before it (lines 16 and 18) is left to
    the memory rule, which knows whether there is room for both.

    Parameters
    ----------
    tolerance_ms
        T, the delay that is tolerated.

    Returns
    -------
    (S,) numbers of forwards; for a stage on several routes the largest.
    """
    costs, m = problem.costs, problem.microbatches
    most = [1] * len(problem.stages)
    for route in problem.all_routes:
        stages = np.array(route)
        hops = [problem.p2p_ms if costs.device[a] != costs.device[b] else 0.0 for a, b in pairwise(route)]
        forward, backward = costs.ms[Kind.F, stages], costs.ms[Kind.B, stages]
        ended = np.cumsum(forward + np.array([0.0, *hops]))  # of each stage's first forward
        back = ended[-1] + np.r_[np.cumsum((backward[1:] + hops)[::-1])[::-1], 0.0]  # EstStart(B_{s,0})
        load = np.bincount(costs.device[stages], weights=forward)
        pace = np.maximum.accumulate(load[costs.device[stages]])
        for s, wait, step in zip(route, (back - ended).tolist(), pace.tolist(), strict=True):
            more = ceil((wait + tolerance_ms) / step - TOLERANCE) if step else m
            most[s] = max(most[s], min(m, 1 + more))
    return tuple(most)
