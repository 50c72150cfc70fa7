"""The engine `milp`: OptPipe's mixed-integer linear program, the reference formulation, of windows and of the whole."""

from __future__ import annotations

from collections.abc import Callable

from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.process.protocol import Frame, Ready, Request

MOST_THREADS: int | None = None
OPEN_ENDED = False
ALONE = True


def unsupported(problem: Problem) -> str | None:
    """Why the engine cannot work on this problem, None if it can."""
    costs = problem.costs
    if costs.can_evict.any():
        return "the model has no evictions"
    if not costs.ms[[Kind.F, Kind.B, Kind.W]].all():
        return "the model orders ops by their times, and some take none; cpsat and lns handle them"
    if costs.host_is_scarce.any():
        return (
            "the model has no limit of host memory, and not all that could be offloaded fits there; cpsat and lns "
            "have it"
        )
    return None


def run(request: Request, emit: Callable[[Frame], None]) -> float | None:
    """Emits better and better schedules, and bounds of the whole problem, until time is up or all is proven. Returns
    the seconds of counted work; None where the wall's time counts."""
    # Imported only in the engine's process: the portfolio asks `unsupported` alone.
    from optpipe_solver.milp.search import solve
    from optpipe_solver.milp.variables import Switches

    emit(Ready())
    return solve(request, emit, Switches(triangles=request.triangles))
