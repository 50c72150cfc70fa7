"""The engine `dispatch`: local search over the rules by which a list scheduler chooses what runs next."""

from __future__ import annotations

from collections.abc import Callable

from optpipe.model.problem import Problem
from optpipe.process.protocol import Frame, Request


class DispatchEngine:
    """Finds schedules with and without transfers and recomputes."""

    name = "dispatch"
    most_threads: int | None = 1
    open_ended = True

    def unsupported(self, problem: Problem) -> str | None:
        """Why the engine cannot work on this problem, None if it can."""
        if problem.microbatches == 1:
            return "with one micro-batch there is nothing to choose"
        return None if problem.costs.ms.any() else "nothing takes any time"

    def run(self, request: Request, emit: Callable[[Frame], None]) -> float | None:
        """Emits better and better schedules until time is up; returns the seconds used by its own count of work."""
        from optpipe.evaluate.jit import compile_at_once
        from optpipe_solver.dispatch.search import search

        compile_at_once()
        return search(request, emit)


ENGINE = DispatchEngine()
