"""The compute ops of a problem, and which of them must precede which (Eq. 1, 5, 6 and 8)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe_solver.bounds.least_memory import used_routes
from optpipe_solver.milp.switches import Order

COMPUTE = (Kind.F, Kind.B, Kind.W)  # the compute ops of the model
Arc = tuple[Op, Op, float]  # the second op starts that many ms after the first has ended, or later


def microbatches_by_route(problem: Problem) -> dict[tuple[int, ...], list[int]]:
    """The micro-batches of each route that is used."""
    return {
        route: [j for j in range(problem.microbatches) if problem.route(j) == route] for route in used_routes(problem)
    }


def compute_ops(problem: Problem) -> list[Op]:
    """F, B and W of every stage that every micro-batch passes."""
    routes = microbatches_by_route(problem).items()
    return [Op(kind, s, j) for kind in COMPUTE for route, batches in routes for s in route for j in batches]


def between_stages(problem: Problem) -> Iterator[Arc]:
    """Eq. 5 and 6: a forward waits for the stage before, an input gradient for the stage after, and for the message
    between two devices."""
    for route, batches in microbatches_by_route(problem).items():
        for j, (s, after) in product(batches, pairwise(route)):
            delay = problem.p2p_ms if problem.stages[s].device != problem.stages[after].device else 0.0
            yield Op(Kind.F, s, j), Op(Kind.F, after, j), delay
            yield Op(Kind.B, after, j), Op(Kind.B, s, j), delay


def within_stage(problem: Problem) -> Iterator[Arc]:
    """Eq. 8: F, then B, then W. It is printed for P alone; with P = 1 the times follow from Eq. 7."""
    for route, batches in microbatches_by_route(problem).items():
        for s, j in product(route, batches):
            yield Op(Kind.F, s, j), Op(Kind.B, s, j), 0.0
            yield Op(Kind.B, s, j), Op(Kind.W, s, j), 0.0


def fixed_order(problem: Problem, order: Order) -> Iterator[Arc]:
    """Eq. 1. Micro-batches of a route are alike: numbering them as they enter its first stage costs nothing. With
    "stages" every stage keeps that order in F, in B and in W."""
    for route, batches in microbatches_by_route(problem).items():
        everywhere = [(kind, s) for kind in COMPUTE for s in route]
        for kind, s in {"none": [], "entry": everywhere[:1], "stages": everywhere}[order]:
            yield from ((Op(kind, s, a), Op(kind, s, b), 0.0) for a, b in pairwise(batches))
