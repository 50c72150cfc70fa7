"""Longest paths between compute ops, before any search: what fixes variables and keeps every big-M small."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from optpipe.evaluate.objective import TOLERANCE
from optpipe.model.arrays import Floats
from optpipe.model.ops import Op
from optpipe.model.problem import Problem
from optpipe_solver.milp.precedences import (
    COMPUTE,
    Arc,
    between_stages,
    compute_ops,
    microbatches_by_route,
    within_stage,
)
from optpipe_solver.milp.surroundings import Surroundings
from optpipe_solver.milp.switches import Order


class LongestPaths:
    """Longest paths between compute ops. Times are `scale` × ms.

    Attributes
    ----------
    arcs
        Precedences, with the delay between the first op's end and the second's start: data dependencies (Eq. 5, 6, 8),
        the fixed order of micro-batches (Eq. 1), and what `horizon` leaves no other choice for.
    lag
        (n, n) the least time from x's start to y's start, -inf where x need not precede y.
    known
        (n, n) whether the model takes it for known that x precedes y. Without `determined` only what an equation says,
        not what follows from several.
    release, rest
        (n,) as in `Surroundings`.
    """

    def __init__(
        self,
        problem: Problem,
        horizon: float,
        scale: float,
        order: Order,
        determined: bool,
        around: Surroundings | None = None,
    ) -> None:
        self.ops = around.ops if around else compute_ops(problem)
        self.number = {op: x for x, op in enumerate(self.ops)}
        self.time: Floats = np.array([problem.costs.ms[op.kind, op.stage] for op in self.ops]) * scale
        self.device = np.array([problem.costs.device[op.stage] for op in self.ops])
        self.horizon, self.scale, self.around = horizon, scale, around
        self.release = np.array([around.release[op] for op in self.ops]) * scale if around else np.zeros(len(self.ops))
        self.rest = np.array([around.rest[op] for op in self.ops]) * scale if around else self.time
        arcs = chain(
            between_stages(problem), within_stage(problem), self._order(problem, order), around.orders if around else ()
        )
        self.arcs = [
            (self.number[a], self.number[b], ms * scale) for a, b, ms in arcs if a in self.number and b in self.number
        ]
        self.lag: Floats = np.full((len(self.ops), len(self.ops)), -np.inf)
        for x, y, delay in self.arcs:
            self.lag[x, y] = max(self.lag[x, y], self.time[x] + delay)
        self._close()
        if not determined:
            # Eq. 1 orders all of a stage, not neighbours only.
            same = np.array([[x[:2] == y[:2] for y in self.ops] for x in self.ops])
            self.known = same & (self.lag > -np.inf)
            self.known[tuple(np.array([(x, y) for x, y, _ in self.arcs]).T)] = True
            return
        while self.possible and (forced := self._forced()):
            self.arcs += [(x, y, 0.0) for x, y in forced]
            for x, y in forced:
                self.lag[x, y] = max(self.lag[x, y], self.time[x])
            self._close()
        self.known = self.lag > -np.inf

    def precedes(self, x: int, y: int) -> bool:
        """Whether x is known to precede y."""
        return bool(self.known[x, y])

    @property
    def possible(self) -> bool:
        """Whether anything may fit into the horizon or, of a window, whether anything shorter may."""
        if not self.ops:
            return False  # a window behind the last op, where only deliveries are (`paths.deliveries`)
        longest = self.horizon * (1 + (-TOLERANCE if self.around else TOLERANCE))
        least = max(self.around.least_ms * self.scale if self.around else 0.0, float((self.head + self.tail).max()))
        return bool((self.lag.diagonal() <= 0.0).all() and least <= longest)

    @property
    def head(self) -> Floats:
        """(n,) the earliest start of each op."""
        head: Floats = np.maximum(self.release, (self.lag + self.release[:, None]).max(axis=0))
        return head

    @property
    def tail(self) -> Floats:
        """(n,) the least time from each op's start to the end of all that follows it."""
        tail: Floats = np.maximum(self.rest, (self.lag + self.rest).max(axis=1))
        return tail

    def _order(self, problem: Problem, order: Order) -> Iterator[Arc]:
        """Eq. 1. Micro-batches of a route are alike: numbering them as they enter its first stage costs nothing. With
        "stages" every stage keeps that order in F, in B and in W."""
        for route, batches in microbatches_by_route(problem).items():
            everywhere = [(kind, s) for kind in COMPUTE for s in route]
            for kind, s in {"none": [], "entry": everywhere[:1], "stages": everywhere}[order]:
                own = (op for j in batches if (op := Op(kind, s, j)) in self.number)
                yield from ((a, b, 0.0) for a, b in pairwise(own))

    def _forced(self) -> list[tuple[int, int]]:
        """Pairs of ops on a device that no schedule within the horizon runs the other way round."""
        related = self.lag > -np.inf
        too_late = (self.head + self.time)[:, None] + self.tail[None, :] > self.horizon * (1 + TOLERANCE)  # y, then x
        pairs: NDArray[np.bool_] = too_late.T & (self.device[:, None] == self.device) & ~related & ~related.T
        np.fill_diagonal(pairs, False)
        return [(int(x), int(y)) for x, y in np.argwhere(pairs & ~pairs.T)]

    def _close(self) -> None:
        for k in range(len(self.ops)):
            np.maximum(self.lag, self.lag[:, k, None] + self.lag[None, k, :], out=self.lag)
