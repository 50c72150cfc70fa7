"""The engine `cpsat`: CP-SAT on the whole problem. `lns` solves windows with the same model."""

from __future__ import annotations

from collections.abc import Callable

from optpipe.model.problem import Problem
from optpipe.process.protocol import Frame, Ready, Request

MOST_THREADS: int | None = None
OPEN_ENDED = False
ALONE = False
# With more, CP-SAT on the whole problem neither proves anything in a minute nor improves a good schedule.
MOST_FORWARDS = 200


def unsupported(problem: Problem) -> str | None:
    """Why the engine cannot work on this problem, None if it can."""
    forwards = sum(len(problem.route(j)) for j in range(problem.microbatches))
    if forwards > MOST_FORWARDS:
        return f"the problem has {forwards} forwards, and this engine takes {MOST_FORWARDS} at most"
    return None


def run(request: Request, emit: Callable[[Frame], None]) -> None:
    """Emits better and better schedules and bounds, until time is up or the best schedule is optimal."""
    # Loads ortools, which takes a second and cannot share a process with highspy.
    from optpipe_solver.cpsat.search import WholeProblemSearch

    emit(Ready())
    WholeProblemSearch(request, emit).run()
