"""The engine `milp`: OptPipe's mixed-integer linear program, the reference formulation. It does not scale."""

from __future__ import annotations

from collections.abc import Callable

from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.process.protocol import Frame, Ready, Request
from optpipe_solver.milp.size import MOST_OPS, count_ops


class MilpEngine:
    """Solves a small problem whole; of a larger one the best schedule, window by window."""

    name = "milp"
    most_threads: int | None = None
    open_ended = False

    def unsupported(self, problem: Problem, *, alone: bool) -> str | None:
        """Why the engine cannot work on this problem, None if it can. `alone`: the user asked for it by name. Otherwise
        it is worth its time only on problems that it solves whole."""
        costs, passes = problem.costs, [problem.route(j) for j in range(problem.microbatches)]
        if costs.can_evict.any():
            return "the model has no evictions"
        if not costs.ms[[Kind.F, Kind.B, Kind.W]].any():
            return "nothing takes any time"
        pinned = [0] * len(problem.devices)
        for s in (s for route in passes for s in route if costs.can_offload[s]):
            pinned[costs.device[s]] += int(costs.offload[s])
        if any(size > limit for size, limit in zip(pinned, costs.host_memory.tolist(), strict=True)):
            return (
                "the model has no limit of host memory, and not all that could be offloaded fits there; cpsat and lns "
                "know it"
            )
        ops = count_ops(problem)
        return None if alone or ops <= MOST_OPS else f"there are {ops} compute ops, and {MOST_OPS} are solved whole"

    def run(self, request: Request, emit: Callable[[Frame], None]) -> None:
        """Emits better and better schedules, and bounds of the whole problem, until time is up or all is proven."""
        # Imported only in the engine's process: the portfolio asks `unsupported` alone.
        from optpipe_solver.milp.solve import solve

        emit(Ready())
        solve(request, emit)


ENGINE = MilpEngine()
