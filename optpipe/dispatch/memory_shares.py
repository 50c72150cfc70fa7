"""How many micro-batches may be in flight at each stage if a device's memory is shared among its stages."""

from __future__ import annotations

import numpy as np

from optpipe.model.arrays import Ints
from optpipe.model.problem import Problem

# Activations for which there is no memory but that would be in flight (a device that waits frees them late), and places
# that go from a device's first stage to each of its others.
CHOICES = tuple((more, extra) for more in (0, 1, 2) for extra in (0, 1))


def visits(device: Ints) -> Ints:
    """(S,) how often a route along these devices was at a stage's device before."""
    return np.array([(device[:s] == d).sum() for s, d in enumerate(device)], dtype=np.int64)


def memory_shares(problem: Problem, more: int, extra: int) -> Ints:
    """(S,) micro-batches in flight, in the order of the only route.

    Stages share by how far they are from the end of the route: their activations are held for about so long. The
    device's first stage has what the others leave.
    """
    route = np.array(problem.route(0))
    costs = problem.costs
    device, activation = costs.device[route], costs.activation[route].mean(axis=1)
    again = visits(device) > 0
    remain = len(route) - np.arange(len(route))
    together = np.bincount(device, remain)[device]
    fit = np.minimum(costs.activation_budget[device] / np.maximum(activation, 1), problem.microbatches).astype(np.int64)
    others = np.where(again, np.maximum(np.rint(remain / together * (fit + more)), 1) + extra, 0)
    first = fit + more - np.bincount(device, others)[device]
    shares: Ints = np.maximum(np.where(again, others, first), 1).astype(np.int64)
    return shares
