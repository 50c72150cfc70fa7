"""Which problems the MILP can work on, and which of them it solves whole."""

from __future__ import annotations

from optpipe.model.ops import Kind
from optpipe.model.problem import Problem

# Compute ops. In a minute on one core HiGHS still improves a good start for 4x8 (96), but not for 6x8 or 4x12 (144).
MOST_OPS = 100


def unsupported(problem: Problem) -> str | None:
    """Why the model cannot express this problem, None if it can."""
    costs, passes = problem.costs, [problem.route(j) for j in range(problem.microbatches)]
    if costs.can_evict.any():
        return "the model has no evictions"
    if not (costs.ms[[Kind.F, Kind.B, Kind.W]] > 0).all():
        # Two ops that take no time could stand in either order at one moment.
        return "the model needs compute ops that take time"
    pinned = [0] * len(problem.devices)
    for s in (s for route in passes for s in route if costs.can_offload[s]):
        pinned[costs.device[s]] += int(costs.offload[s])
    if any(size > limit for size, limit in zip(pinned, costs.host_memory.tolist(), strict=True)):
        return "the model has no limit of host memory, and not all that could be offloaded fits there"
    return None


def too_large(problem: Problem) -> str | None:
    """Why the problem is not solved whole, None if it is."""
    ops = 3 * sum(len(problem.route(j)) for j in range(problem.microbatches))
    return None if ops <= MOST_OPS else f"there are {ops} compute ops, and {MOST_OPS} are solved whole"
