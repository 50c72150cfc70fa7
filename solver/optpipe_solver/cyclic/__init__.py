"""The engine `cyclic`: micro-batches repeat with the shortest period that memory and links allow."""

from __future__ import annotations

from collections.abc import Callable

from optpipe.model.problem import Problem
from optpipe.process.protocol import Frame, Ready, Request

FEWEST = 2  # micro-batches that can repeat


class CyclicEngine:
    """Unrolls periodic patterns, then improves the best of them window by window."""

    name = "cyclic"
    most_threads: int | None = None
    open_ended = False

    def unsupported(self, problem: Problem, *, alone: bool) -> str | None:
        """Why the engine cannot work on this problem, None if it can."""
        if len(problem.all_routes) > 1:
            return "the micro-batches take several routes, so they do not repeat"
        return "there are too few micro-batches to repeat" if problem.microbatches < FEWEST else None

    def run(self, request: Request, emit: Callable[[Frame], None]) -> float | None:
        """Emits better and better schedules until time is up; returns the seconds used by its own count of work."""
        # Loads ortools, which takes a second and cannot share a process with highspy.
        from optpipe_solver.cyclic.pattern_search import search

        emit(Ready())
        return search(request, emit)


ENGINE = CyclicEngine()
