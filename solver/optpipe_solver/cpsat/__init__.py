"""The problem on CP-SAT, whole or a window of it; and the engine that solves the whole."""

from __future__ import annotations

from collections.abc import Callable

from optpipe.model.problem import Problem
from optpipe.process.protocol import Frame, Request

MOST_FORWARDS = (
    200  # beyond them CP-SAT on the whole problem neither proves anything in a minute nor improves a good schedule
)


def applies(problem: Problem) -> bool:
    """Whether the problem is small enough, and the models describe it: nothing may be evicted, which a proof would have
    to know."""
    passes = sum(len(problem.route(j)) for j in range(problem.microbatches))
    return passes <= MOST_FORWARDS and not problem.costs.can_evict.any()


def run(request: Request, emit: Callable[[Frame], None]) -> None:
    """Emits better and better schedules, and bounds, until the request's time is up or the best is proven to be it."""
    from optpipe_solver.cpsat.search import Search

    Search(request, emit).run()
