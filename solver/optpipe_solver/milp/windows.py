"""Which compute op must precede which, and when each can run, before any search: what fixes variables and keeps every
big-M small."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise, product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from optpipe.model.arrays import Floats
from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe_solver.bounds.least_memory import used_routes
from optpipe_solver.milp.switches import Order

if TYPE_CHECKING:
    from optpipe_solver.milp.frame import Frame

SLACK = 1e-9  # relative, of sums of times
Arc = tuple[Op, Op, float]  # the second starts that many ms after the first has ended, or later


def passing(problem: Problem) -> dict[tuple[int, ...], list[int]]:
    """The micro-batches of each route that is used, alike but for their number."""
    return {
        route: [j for j in range(problem.microbatches) if problem.route(j) == route] for route in used_routes(problem)
    }


def compute_ops(problem: Problem) -> list[Op]:
    """F, B and W of every stage that every micro-batch passes."""
    kinds = (Kind.F, Kind.B, Kind.W)
    return [
        Op(kind, s, j) for kind in kinds for route, batches in passing(problem).items() for s in route for j in batches
    ]


def between_stages(problem: Problem) -> Iterator[Arc]:
    """Eq. 5 and 6: a forward waits for the stage before, a backward for the stage behind, and for the message between
    two devices."""
    for route, batches in passing(problem).items():
        for j, (s, after) in product(batches, pairwise(route)):
            delay = problem.p2p_ms if problem.stages[s].device != problem.stages[after].device else 0.0
            yield Op(Kind.F, s, j), Op(Kind.F, after, j), delay
            yield Op(Kind.B, after, j), Op(Kind.B, s, j), delay


def within_stage(problem: Problem) -> Iterator[Arc]:
    """Eq. 8: F, then B, then W. As printed it says so of P alone; with P = 1 in Eq. 7 the times follow."""
    for route, batches in passing(problem).items():
        for s, j in product(route, batches):
            yield Op(Kind.F, s, j), Op(Kind.B, s, j), 0.0
            yield Op(Kind.B, s, j), Op(Kind.W, s, j), 0.0


class Windows:
    """Longest paths between compute ops. `lag[x, y]`: the least time from x's start to y's start, -inf where x need not
    precede y. `known[x, y]`: whether the model takes it for known; without `determined` only what an equation says, not
    what follows from several.

    `arcs` are the precedences behind it, with the delay between x's end and y's start: data dependencies (Eq. 5, 6, 8),
    the fixed order of micro-batches (Eq. 1), and what `horizon` leaves no other choice for. `release` and `rest`: what
    a frame adds, the earliest start by what is before it, and the least time from an op's start to the end by what is
    after it. Times are `scale` × ms.
    """

    def __init__(
        self, problem: Problem, horizon: float, scale: float, order: Order, determined: bool, frame: Frame | None = None
    ) -> None:
        self.ops = frame.ops if frame else compute_ops(problem)
        self.number = {op: x for x, op in enumerate(self.ops)}
        self.time: Floats = np.array([problem.costs.ms[op.kind, op.stage] for op in self.ops]) * scale
        self.device = np.array([problem.costs.device[op.stage] for op in self.ops])
        self.horizon, self.scale, self.frame = horizon, scale, frame
        self.release = np.array([frame.release[op] for op in self.ops]) * scale if frame else np.zeros(len(self.ops))
        self.rest = np.array([frame.rest[op] for op in self.ops]) * scale if frame else self.time
        arcs = chain(
            between_stages(problem), within_stage(problem), self._order(problem, order), frame.orders if frame else ()
        )
        self.arcs = [
            (self.number[a], self.number[b], ms * scale) for a, b, ms in arcs if a in self.number and b in self.number
        ]
        self.lag: Floats = np.full((len(self.ops), len(self.ops)), -np.inf)
        for x, y, delay in self.arcs:
            self.lag[x, y] = max(self.lag[x, y], self.time[x] + delay)
        self._close()
        if not determined:
            same = np.array(
                [[x[:2] == y[:2] for y in self.ops] for x in self.ops]
            )  # Eq. 1 orders all of a stage, not neighbours only
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
        """Whether anything fits into the horizon: no op must precede itself. In a frame, whether anything shorter
        may."""
        longest = self.horizon * (1 + (-SLACK if self.frame else SLACK))
        around = self.frame.least_ms * self.scale if self.frame else 0.0
        return bool((self.lag.diagonal() <= 0.0).all() and max(around, float((self.head + self.tail).max())) <= longest)

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
        `stages` every stage keeps that order in F, in B and in W."""
        for route, batches in passing(problem).items():
            everywhere = [(kind, s) for kind in (Kind.F, Kind.B, Kind.W) for s in route]
            for kind, s in {"none": [], "entry": [(Kind.F, route[0])], "stages": everywhere}[order]:
                own = (op for j in batches if (op := Op(kind, s, j)) in self.number)
                yield from ((a, b, 0.0) for a, b in pairwise(own))

    def _forced(self) -> list[tuple[int, int]]:
        """Pairs on a device that no schedule within the horizon runs the other way round."""
        related = self.lag > -np.inf
        too_late = (self.head + self.time)[:, None] + self.tail[None, :] > self.horizon * (1 + SLACK)  # y, then x
        pairs: NDArray[np.bool_] = too_late.T & (self.device[:, None] == self.device) & ~related & ~related.T
        np.fill_diagonal(pairs, False)
        return [(int(x), int(y)) for x, y in np.argwhere(pairs & ~pairs.T)]

    def _close(self) -> None:
        for k in range(len(self.ops)):
            np.maximum(self.lag, self.lag[:, k, None] + self.lag[None, k, :], out=self.lag)
