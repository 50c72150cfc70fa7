"""The cyclic engine: micro-batches repeat with the shortest period that memory and links admit (modulo scheduling,
DESIGN section 5)."""

from __future__ import annotations

from collections.abc import Callable

from optpipe.model.problem import Problem
from optpipe.process.protocol import Frame, Request

FEWEST = 2  # micro-batches that can repeat


def applies(problem: Problem) -> bool:
    """Whether one route is taken by all micro-batches, and there are some to repeat."""
    return len(problem.all_routes) == 1 and problem.microbatches >= FEWEST


def run(request: Request, emit: Callable[[Frame], None]) -> float | None:
    """Emits better and better schedules until the request's time is up; returns how much of it was used by count."""
    from optpipe_solver.cyclic import search

    return search.run(request, emit)
