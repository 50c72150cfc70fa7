"""How many micro-batches may be in flight at each stage if a device's memory is shared among its stages."""

from __future__ import annotations

import numpy as np

from optpipe.model.arrays import Ints
from optpipe.model.problem import Problem

# Activations for which there is no memory but that would be in flight (a device that waits frees them late), and places
# that go from a device's first stage to each of its others.
CHOICES = tuple((more, extra) for more in (0, 1, 2) for extra in (0, 1))


def stage_order(problem: Problem) -> Ints:
    """(S,) the stages in the order of the only route; in that of their numbers where there are several routes."""
    return np.array(problem.route(0)) if len(problem.all_routes) == 1 else np.arange(len(problem.stages))


def stages_to_end(problem: Problem) -> Ints:
    """(S,) how many stages are left from each, itself included, on the longest of its routes; in `stage_order`."""
    left = np.zeros(len(problem.stages), dtype=np.int64)
    for route in problem.all_routes:
        left[list(route)] = np.maximum(left[list(route)], np.arange(len(route), 0, -1))
    return left[stage_order(problem)]


def visits(device: Ints) -> Ints:
    """(S,) how many stages before each one are on its device."""
    return np.array([(device[:s] == d).sum() for s, d in enumerate(device)], dtype=np.int64)


def memory_shares(problem: Problem, more: int, extra: int) -> Ints:
    """(S,) micro-batches in flight, in `stage_order`.

    Stages share by how far they are from the end of their route: their activations are held for about so long. The
    device's first stage has what the others leave.
    """
    order, remain, costs = stage_order(problem), stages_to_end(problem), problem.costs
    device, activation = costs.device[order], costs.activation[order].mean(axis=1)
    again = visits(device) > 0
    together = np.bincount(device, remain)[device]
    fit = np.minimum(costs.activation_budget[device] / np.maximum(activation, 1), problem.microbatches).astype(np.int64)
    others = np.where(again, np.maximum(np.rint(remain / together * (fit + more)), 1) + extra, 0)
    first = fit + more - np.bincount(device, others)[device]
    shares: Ints = np.maximum(np.where(again, others, first), 1).astype(np.int64)
    return shares
