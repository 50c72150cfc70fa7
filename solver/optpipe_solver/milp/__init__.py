"""The engine `milp`: OptPipe's mixed-integer linear program, the reference formulation. It does not scale."""

from __future__ import annotations

from collections.abc import Callable

from optpipe.model.problem import Problem
from optpipe.process.protocol import Frame, Request
from optpipe_solver.milp.scope import too_large, unsupported


class MilpEngine:
    """Solves a small problem whole; of a larger one the best schedule, window by window."""

    name = "milp"

    def unsupported(self, problem: Problem, *, alone: bool) -> str | None:
        """Why the engine cannot work on this problem, None if it can.

        `alone`: the user asked for it by name. Otherwise it is worth its time only on problems that it solves whole.
        """
        return unsupported(problem) or (None if alone else too_large(problem))

    def run(self, request: Request, emit: Callable[[Frame], None]) -> None:
        """Emits better and better schedules, and bounds of the whole problem, until time is up or all is proven."""
        # Imported only in the engine's process: the portfolio asks `unsupported` alone.
        from optpipe_solver.milp.solve import solve

        solve(request, emit)


ENGINE = MilpEngine()
