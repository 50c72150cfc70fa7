"""Longest paths between compute ops, before any search: what fixes variables and keeps every big-M small."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optpipe.evaluate.objective import TOLERANCE
from optpipe.model.arrays import Floats
from optpipe.model.problem import Problem
from optpipe_solver.milp.precedences import between_stages, compute_ops, fixed_order, within_stage
from optpipe_solver.milp.switches import Order


class NumberedArc(NamedTuple):
    """Op `after` starts `delay` after op `before` has ended, or later; ops by their numbers."""

    before: int
    after: int
    delay: float


class LongestPaths:
    """Longest paths between compute ops. Times are `scale` × ms.

    Attributes
    ----------
    ops, number
        The compute ops, and the number of each.
    time, device
        (n,) by op.
    arcs
        Precedences: data dependencies (Eq. 5, 6, 8), the fixed order of micro-batches (Eq. 1), and what `horizon`
        leaves no other choice for.
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
        self.arcs = [NumberedArc(self.number[a], self.number[b], ms * scale) for a, b, ms in arcs]
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
                self.arcs.append(NumberedArc(x, y, 0.0))
                self.lag[x, y] = max(self.lag[x, y], self.time[x])
            self._close_transitively()

    def _close_transitively(self) -> None:
        for k in range(len(self.ops)):
            np.maximum(self.lag, self.lag[:, k, None] + self.lag[None, k, :], out=self.lag)
