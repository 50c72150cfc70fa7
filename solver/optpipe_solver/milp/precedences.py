"""The compute ops of a problem, which of them must precede which (Eq. 1, 5, 6 and 8), and the longest paths that
follow, before any search: they fix variables and keep every big-M small."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise, product

import numpy as np
from numpy.typing import NDArray

from optpipe.evaluate.objective import TOLERANCE
from optpipe.model.arrays import Floats
from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe_solver.milp.switches import Order

COMPUTE = (Kind.F, Kind.B, Kind.W)  # the compute ops of the model
Arc = tuple[Op, Op, float]  # the second op starts that many ms after the first has ended, or later


def equal_microbatches(problem: Problem) -> list[tuple[tuple[int, ...], list[int]]]:
    """All micro-batches, those together that are equal, and the route that they take."""
    return [(problem.route(batches[0]), batches) for batches in problem.costs.classes]


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


class LongestPaths:
    """Longest paths between compute ops. Times are `scale` × ms.

    Attributes
    ----------
    ops, number
        The compute ops, and the number of each.
    time, device
        (n,) by op.
    arcs
        Precedences, as `Arc` with the ops' numbers: data dependencies (Eq. 5, 6, 8), the fixed order of micro-batches
        (Eq. 1), and what `horizon` leaves no other choice for.
    lag
        (n, n) the least time from x's start to y's start, -inf where x need not precede y.
    known
        (n, n) whether the model takes it for known that x precedes y. Without `determined` only what an equation says,
        not what follows from several.
    """

    def __init__(self, problem: Problem, horizon: float, scale: float, order: Order, determined: bool) -> None:
        self.ops = compute_ops(problem)
        self.number = {op: x for x, op in enumerate(self.ops)}
        self.time: Floats = np.array([problem.costs.ms[op.kind, op.stage, op.microbatch] for op in self.ops]) * scale
        self.device = np.array([problem.costs.device[op.stage] for op in self.ops])
        self.horizon, self.scale = horizon, scale
        arcs = chain(between_stages(problem), within_stage(problem), fixed_order(problem, order))
        self.arcs = [(self.number[a], self.number[b], ms * scale) for a, b, ms in arcs]
        self.lag: Floats = np.full((len(self.ops), len(self.ops)), -np.inf)
        for x, y, delay in self.arcs:
            self.lag[x, y] = max(self.lag[x, y], self.time[x] + delay)
        self._close_transitively()
        self.known = self._by_one_equation()
        if determined:
            self._add_forced_arcs()
            self.known = self.lag > -np.inf

    def precedes(self, x: int, y: int) -> bool:
        """Whether x is known to precede y."""
        return bool(self.known[x, y])

    @property
    def possible(self) -> bool:
        """Whether anything may fit into the horizon."""
        no_cycle = bool((self.lag.diagonal() <= 0.0).all())
        return no_cycle and float((self.head + self.tail).max()) <= self.horizon * (1 + TOLERANCE)

    @property
    def head(self) -> Floats:
        """(n,) the earliest start of each op."""
        head: Floats = np.maximum(0.0, self.lag.max(axis=0))
        return head

    @property
    def tail(self) -> Floats:
        """(n,) the least time from each op's start to the end of all that follows it."""
        tail: Floats = np.maximum(self.time, (self.lag + self.time).max(axis=1))
        return tail

    def _by_one_equation(self) -> NDArray[np.bool_]:
        """(n, n) the arcs, and all pairs of a stage and kind that Eq. 1 orders, not neighbours only."""
        alike = np.array([[x[:2] == y[:2] for y in self.ops] for x in self.ops])
        known: NDArray[np.bool_] = alike & (self.lag > -np.inf)
        for x, y, _ in self.arcs:
            known[x, y] = True
        return known

    def _add_forced_arcs(self) -> None:
        """Adds pairs of ops of a device that no schedule within the horizon runs the other way round, until there are
        no more."""
        while self.possible:
            related = self.lag > -np.inf
            y_before_x = (self.head + self.time)[:, None] + self.tail[None, :]  # by y, x: the least length
            too_late = (y_before_x > self.horizon * (1 + TOLERANCE)).T
            forced = too_late & (self.device[:, None] == self.device) & ~related & ~related.T
            np.fill_diagonal(forced, False)
            pairs = np.argwhere(forced & ~forced.T).tolist()
            if not pairs:
                return
            for x, y in pairs:
                self.arcs.append((x, y, 0.0))
                self.lag[x, y] = max(self.lag[x, y], self.time[x])
            self._close_transitively()

    def _close_transitively(self) -> None:
        for k in range(len(self.ops)):
            np.maximum(self.lag, self.lag[:, k, None] + self.lag[None, k, :], out=self.lag)
