"""The engine `lns`: large-neighbourhood search. CP-SAT solves windows of the best schedule until time is up."""

from __future__ import annotations

from collections.abc import Callable

from optpipe.model.problem import Problem
from optpipe.process.protocol import Frame, Ready, Request

MOST_THREADS: int | None = None
OPEN_ENDED = True
ALONE = False


def unsupported(problem: Problem) -> str | None:
    """Why the engine cannot work on this problem, None if it can."""
    return None if problem.costs.ms.any() else "nothing takes any time"


def run(request: Request, emit: Callable[[Frame], None]) -> float | None:
    """Emits better and better schedules until time is up; returns the seconds used by its own count of work."""
    # Loads ortools, which takes a second and cannot share a process with highspy.
    from optpipe_solver.lns.improve import improve

    emit(Ready())
    return improve(request, emit)
