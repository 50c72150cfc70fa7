"""Compute ops, which order of them is fixed before any search, and the longest paths between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, pairwise, product
from typing import Literal as OneOf

import numpy as np

from optpipe.evaluate.objective import TOLERANCE
from optpipe.model.arrays import NONE, Floats
from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe_solver.milp.rows import longest_paths

COMPUTE = (Kind.F, Kind.B, Kind.W)  # the compute ops of the model
MicrobatchOrder = OneOf["none", "entry", "stages"]
Arc = tuple[Op, Op, float]  # the second op starts that many ms after the first has ended, or later
Activation = tuple[int, int, int]  # stage, micro-batch, and part or `WHOLE`
WHOLE = -1


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
    """Eq. 8: F, then B, then W."""
    for route, batches in equal_microbatches(problem):
        for s, j in product(route, batches):
            yield Op(Kind.F, s, j), Op(Kind.B, s, j), 0.0
            yield Op(Kind.B, s, j), Op(Kind.W, s, j), 0.0


def fixed_order(problem: Problem, order: MicrobatchOrder) -> Iterator[Arc]:
    """Eq. 1, first line. Equal micro-batches of a route: numbering them as they enter its first stage costs nothing.
    With "stages" every stage keeps that order in F, in B and in W. Different ones keep it only where the problem fixes
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
    """Longest paths between compute ops, which fix variables and keep every big-M small. Times are `scale` × ms."""

    def __init__(
        self,
        problem: Problem,
        ops: Iterable[Op],
        horizon: float,
        scale: float,
        fixed: Iterable[Arc],
        determined: bool,
    ) -> None:
        self.ops = list(ops)
        self.number = {op: x for x, op in enumerate(self.ops)}
        kind, stage, microbatch, level = np.array(self.ops).T
        level = np.where(kind == Kind.C, level, NONE)
        self.time: Floats = problem.costs.op_ms(kind, stage, microbatch, level) * scale
        self.device = np.array([problem.costs.device[op.stage] for op in self.ops])
        self.horizon, self.scale = horizon, scale
        # Precedences, as `Arc` with the ops' numbers: data dependencies (Eq. 5, 6, 8), the fixed order of micro-batches
        # (Eq. 1) and of a window, `fixed`, and what `horizon` leaves no other choice for.
        arcs = chain(between_stages(problem), within_stage(problem), fixed)
        self.arcs = [(self.number[a], self.number[b], ms * scale) for a, b, ms in arcs]
        # (n, n) the least time from x's start to y's start, -inf where x need not precede y.
        self.lag: Floats = np.full((len(self.ops), len(self.ops)), -np.inf)
        self._close_transitively()
        # (n, n) whether the model fixes that x precedes y: all that follows or, if not `determined`, what one equation
        # fixes: the arcs, and all pairs of a stage and kind that Eq. 1 orders, not neighbours only.
        if determined:
            self._add_forced_arcs()
            self.fixed = self.lag > -np.inf
        else:
            of_one_kind = np.array([[x[:2] == y[:2] for y in self.ops] for x in self.ops])
            self.fixed = of_one_kind & (self.lag > -np.inf)
            for x, y, _ in self.arcs:
                self.fixed[x, y] = True

    def precedes(self, x: int, y: int) -> bool:
        """Whether the model fixes that x precedes y."""
        return bool(self.fixed[x, y])

    @property
    def possible(self) -> bool:
        """Whether anything may fit into the horizon."""
        return self._acyclic and float((self.head + self.tail).max()) <= self.horizon * (1 + TOLERANCE)

    def _add_forced_arcs(self) -> None:
        """Adds pairs of a device's ops that no schedule within the horizon runs the other way round, until there are no
        more."""
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
            self._close_transitively()

    def _close_transitively(self) -> None:
        lag = longest_paths(len(self.ops), [(y, x, self.time[x] + delay) for x, y, delay in self.arcs])
        self._acyclic = lag is not None
        if lag is not None:
            self.lag = lag
        # (n,) the earliest start of each op, and the least time from it to the end of all that follows.
        self.head: Floats = np.maximum(0.0, self.lag.max(axis=0))
        self.tail: Floats = np.maximum(self.time, (self.lag + self.time).max(axis=1))
