"""The compute ops of a problem, and which of them must precede which (Eq. 1, 5, 6 and 8)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe_solver.milp.switches import Order

COMPUTE = (Kind.F, Kind.B, Kind.W)  # the compute ops of the model
Arc = tuple[Op, Op, float]  # the second op starts that many ms after the first has ended, or later


class EqualMicrobatches(NamedTuple):
    """Micro-batches that are equal, and the route that they take."""

    route: tuple[int, ...]
    batches: list[int]


def equal_microbatches(problem: Problem) -> list[EqualMicrobatches]:
    """All micro-batches, those together that are equal."""
    return [EqualMicrobatches(problem.route(batches[0]), batches) for batches in problem.costs.classes]


def compute_ops(problem: Problem) -> list[Op]:
    """F, B and W of every stage that every micro-batch passes."""
    classes = equal_microbatches(problem)
    return [Op(kind, s, j) for kind in COMPUTE for route, batches in classes for s in route for j in batches]


def between_stages(problem: Problem) -> Iterator[Arc]:
    """Eq. 5 and 6: a forward waits for the stage before, an input gradient for the stage after, and for the message
    between two devices."""
    there, back = problem.costs.message_ms.tolist()
    for route, batches in equal_microbatches(problem):
        for j, (s, after) in product(batches, pairwise(route)):
            yield Op(Kind.F, s, j), Op(Kind.F, after, j), there[after][j]
            yield Op(Kind.B, after, j), Op(Kind.B, s, j), back[s][j]


def within_stage(problem: Problem) -> Iterator[Arc]:
    """Eq. 8: F, then B, then W. It is printed for P alone; with P = 1 the times follow from Eq. 7."""
    for route, batches in equal_microbatches(problem):
        for s, j in product(route, batches):
            yield Op(Kind.F, s, j), Op(Kind.B, s, j), 0.0
            yield Op(Kind.B, s, j), Op(Kind.W, s, j), 0.0


def fixed_order(problem: Problem, order: Order) -> Iterator[Arc]:
    """Eq. 1. Equal micro-batches of a route: numbering them as they enter its first stage costs nothing. With
    "stages" every stage keeps that order in F, in B and in W. Different ones keep it only where the problem fixes
    it."""
    if problem.fixed_order:
        for r, route in enumerate(problem.all_routes):
            entering = np.flatnonzero(problem.costs.route == r).tolist()
            yield from ((Op(Kind.F, route[0], a), Op(Kind.F, route[0], b), 0.0) for a, b in pairwise(entering))
    for route, batches in equal_microbatches(problem):
        everywhere = [(kind, s) for kind in COMPUTE for s in route]
        for kind, s in {"none": [], "entry": everywhere[:1], "stages": everywhere}[order]:
            yield from ((Op(kind, s, a), Op(kind, s, b), 0.0) for a, b in pairwise(batches))
