"""Large-neighbourhood search: windows of the best schedule, solved exactly by CP-SAT, until time is up."""

from __future__ import annotations

from collections.abc import Callable

from optpipe.model.problem import Problem
from optpipe.process.protocol import Frame, Request


def applies(problem: Problem) -> bool:
    """To every problem in which something takes time."""
    return bool(problem.costs.ms.any())


def run(request: Request, emit: Callable[[Frame], None]) -> float | None:
    """Emits better and better schedules until the request's time is up; returns how much of it was used by count."""
    from optpipe_solver.lns import search

    return search.run(request, emit)
