"""How many micro-batches may be in flight at each stage if a device's memory is shared among its stages."""

from __future__ import annotations

import numpy as np

from optpipe.model.arrays import Ints
from optpipe.model.problem import Problem

BEYOND_MEMORY = (0, 1, 2)  # micro-batches in flight for which there is no room: a device that waits frees them late
GIVEN_UP = (0, 1)  # micro-batches in flight that a device's first stage leaves to each of its other stages


def stage_order(problem: Problem) -> Ints:
    """(S,) the stages in the order of the only route; in that of their numbers where there are several routes."""
    return np.array(problem.route(0)) if len(problem.all_routes) == 1 else np.arange(len(problem.stages))


def stages_to_end(problem: Problem) -> Ints:
    """(S,) how many stages are left from each, itself included, on the longest of its routes; in `stage_order`."""
    left = np.zeros(len(problem.stages), dtype=np.int64)
    for route in problem.all_routes:
        left[list(route)] = np.maximum(left[list(route)], np.arange(len(route), 0, -1))
    return left[stage_order(problem)]


def chunks_of_stages(device: Ints) -> Ints:
    """(S,) which chunk of its device each stage is, from 0, if stage s is on `device[s]`."""
    return np.array([(device[:s] == d).sum() for s, d in enumerate(device)], dtype=np.int64)


def memory_shares(problem: Problem) -> list[Ints]:
    """Each (S,) micro-batches in flight by one way to share memory, in `stage_order`."""
    return [_share_memory(problem, beyond, given_up) for beyond in BEYOND_MEMORY for given_up in GIVEN_UP]


def _share_memory(problem: Problem, beyond: int, given_up: int) -> Ints:
    """(S,) micro-batches in flight.

    Stages share by how far they are from the end of their route: their activations are held for about so long. The
    device's first stage has what the others leave.
    """
    order, remain, costs = stage_order(problem), stages_to_end(problem), problem.costs
    device, activation = costs.device[order], costs.activation[order].mean(axis=1)
    is_later_chunk = chunks_of_stages(device) > 0
    together = np.bincount(device, remain)[device]
    fit = np.minimum(costs.activation_budget[device] / np.maximum(activation, 1), problem.microbatches).astype(np.int64)
    later = np.where(is_later_chunk, np.maximum(np.rint(remain / together * (fit + beyond)), 1) + given_up, 0)
    first = fit + beyond - np.bincount(device, later)[device]
    shares: Ints = np.maximum(np.where(is_later_chunk, later, first), 1).astype(np.int64)
    return shares
