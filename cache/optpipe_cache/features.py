"""Features of a problem: its figures as proportions on a coarse grid (OptPipe, section 4.2: "discretize ... into
proportional values").

Times are shares of a stage's work, the mean of F + B + W over all stages. A device's memory is the number of
micro-batches whose activations fit into it. So the same model on a GPU twice as fast, or measured again on a noisy day,
has the same features.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
from numpy.typing import NDArray

from optpipe.model.ops import Kind
from optpipe.model.problem import Problem

GRID = 20  # steps per unit: smaller differences are noise of the measurement
MOST = 1e9  # cap of proportions: dividing by times near zero gives no useful number

Features = dict[str, list[int]]  # name -> a figure per stage or device, in steps of 1/GRID


def structure(problem: Problem) -> str:
    """Hash what two problems must have in common before a program of one makes sense for the other.

    That is which ops there are, and on which devices they run.
    """
    costs = problem.costs
    content = {
        "devices": len(problem.devices),
        "placement": costs.device.tolist(),
        "routes": problem.all_routes,
        "microbatch_routes": costs.route.tolist(),
        "transfer_mode": problem.transfer_mode,
        "shared_links": problem.shared_links,
        "offload_parts": costs.parts.tolist(),
        "can_offload": costs.can_offload.tolist(),
        "can_recompute": costs.can_recompute.tolist(),
        "pairs": problem.overlap_factor is not None,
    }
    # Only what a problem has is hashed, so that entries of older releases are still found.
    if costs.can_evict.any():
        content |= {"can_evict": costs.can_evict.tolist(), "peer": costs.peer.tolist()}
    if costs.can_update.any():
        content["can_update"] = costs.can_update.tolist()
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def features(problem: Problem) -> Features:
    """Return the problem's proportions, in steps of 1/GRID."""
    costs, m = problem.costs, problem.microbatches
    work = float(costs.ms[[Kind.F, Kind.B, Kind.W]].sum(axis=0).mean()) or 1.0
    activation = np.maximum(costs.activation, 1)
    memory, host = [], []
    for d in range(len(problem.devices)):
        own = problem.stages_on(d)
        memory.append(_microbatches(costs.activation_budget[d], costs.activation[own], m))
        host.append(_microbatches(costs.host_memory[d], costs.offload[own], m))
    proportions = {
        "forward": costs.ms[Kind.F] / work,
        "backward_input": costs.ms[Kind.B] / work,
        "backward_weight": costs.ms[Kind.W] / work,
        "p2p": [problem.p2p_ms / work],
        "offload": costs.ms[Kind.O] * costs.parts / work,
        "reload": costs.ms[Kind.R] * costs.parts / work,
        "recompute": costs.ms[Kind.C] / work,
        "overlap": [problem.overlap_factor or 1.0],
        "memory": memory,
        "host_memory": host,
        "saved_for_weight": costs.saved_for_weight / activation,
        "offload_bytes": costs.offload / activation,
        "checkpoint": costs.checkpoint / activation,
    }
    if costs.can_evict.any():
        proportions |= {
            "evict": costs.ms[Kind.E] / work,
            "load": costs.ms[Kind.L] / work,
            "evict_bytes": costs.evict / activation,
        }
    if costs.can_update.any():
        proportions |= {kind.name: costs.ms[kind] / work for kind in (Kind.G, Kind.U, Kind.P)}
    return {name: [round(GRID * min(MOST, float(value))) for value in values] for name, values in proportions.items()}


def _microbatches(limit: int, per_stage: NDArray[np.int64], m: int) -> float:
    """How many micro-batches fit into `limit` bytes, at most `m`: more memory than that makes no difference."""
    one = int(per_stage.sum())
    return min(float(m), limit / one) if one else float(m)


def distance(a: Features, b: Features) -> float:
    """Return how different two problems of one structure are.

    The mean |difference| over stages or devices of each feature, summed over the features. For example, 0.1 is a
    forward pass that differs by a tenth of a stage's F + B + W on every stage, or a tenth of an activation less memory
    on every device. Differences below the grid count as 0.
    """
    return sum(float(np.abs(np.subtract(a[name], b[name])).mean()) for name in a) / GRID
