"""The variables of OptPipe's program, in the paper's letters."""

from __future__ import annotations

from itertools import combinations, product

from optpipe.evaluate.effects import Effects
from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe_solver.milp.precedences import COMPUTE, LongestPaths, equal_microbatches
from optpipe_solver.milp.rows import FALSE, TRUE, Literal, Rows, Span
from optpipe_solver.milp.switches import Switches

Activation = tuple[int, int]  # stage and micro-batch


class Variables:
    """The variables of a model, and the rows that they are part of. Times are `paths.scale` × ms.

    Compute ops have numbers (`paths.number`). Activations are those that can leave.

    Attributes
    ----------
    E
        By op: when it ends.
    C
        The makespan or the span.
    P
        By two ops of a device: whether the first runs before the second (Eq. 7).
    W
        By activation: whether it is offloaded.
    O, R
        By activation: when its offload and its reload start.
    A
        By activation: when its reload takes its place in its program and allocates. Its copy may start later, when the
        link is free.
    K, L, H
        By two activations on a link: whether offload runs before offload, reload before reload, and, where the link is
        half duplex, offload before reload.
    M, N
        By activation and op of its device: whether its drop, and whether its reload, comes before the op; in between it
        is away. M only for ops that take memory.
    X
        By two activations of a device: whether the first is away when the second one's reload allocates.
    """

    def __init__(self, problem: Problem, paths: LongestPaths, switches: Switches, rows: Rows) -> None:
        self.problem, self.costs, self.paths, self.rows = problem, problem.costs, paths, rows
        self.order, self._one_per_pair = switches.order, switches.one_per_pair
        earliest, latest = paths.head + paths.time, paths.horizon - paths.tail + paths.time
        self.E = [rows.new_variable(low, max(low, high)) for low, high in zip(earliest, latest, strict=True)]
        self.C = rows.new_variable(0.0, paths.horizon)
        stages = stages_that_may_offload(problem)
        self.activations: list[Activation] = [
            (op.stage, op.microbatch) for op in paths.ops if op.kind == Kind.F and op.stage in stages
        ]
        self.P: dict[tuple[int, int], Literal] = {}
        self.W: dict[Activation, Literal] = {}
        self.O: dict[Activation, int] = {}
        self.R: dict[Activation, int] = {}
        self.A: dict[Activation, int] = {}
        self.K: dict[tuple[Activation, Activation], Literal] = {}
        self.L: dict[tuple[Activation, Activation], Literal] = {}
        self.H: dict[tuple[Activation, Activation], Literal] = {}
        self.M: dict[tuple[Activation, int], Literal] = {}
        self.N: dict[tuple[Activation, int], Literal] = {}
        self.X: dict[tuple[Activation, Activation], Literal] = {}
        self._create_compute_orders()
        self._create_transfers()
        self._create_link_orders()

    # --- new variables

    def new_order(self) -> tuple[Literal, Literal]:
        """Eq. 1: whether one precedes the other, and whether the other precedes the one: exactly one of both."""
        first = self.rows.new_literal()
        if self._one_per_pair:
            return first, ~first
        second = self.rows.new_literal()
        self.rows.add_clause(first, second)
        self.rows.add_clause(~first, ~second)
        return first, second

    def _create_compute_orders(self) -> None:
        """P; no variable where the order is known. As the k-th W of a stage can always be the W of its k-th B (what a W
        frees is alike), Ws follow the order of their Bs where an order is fixed at all."""
        paths = self.paths
        for x, y in combinations(range(len(paths.ops)), 2):
            if paths.device[x] != paths.device[y]:
                continue
            first, second = paths.ops[x], paths.ops[y]
            if paths.precedes(x, y):
                order = TRUE, FALSE
            elif paths.precedes(y, x):
                order = FALSE, TRUE
            elif (
                first.kind == second.kind == Kind.W
                and first.stage == second.stage
                and self._follow_gradients(first, second)
            ):
                b, c = paths.number[first._replace(kind=Kind.B)], paths.number[second._replace(kind=Kind.B)]
                order = self.P[b, c], self.P[c, b]
            else:
                order = self.new_order()
            self.P[x, y], self.P[y, x] = order

    def _follow_gradients(self, first: Op, second: Op) -> bool:
        """Whether two Ws of a stage stand in the order of their Bs."""
        return self.order != "none" and self._are_equal(first.microbatch, second.microbatch)

    def _create_transfers(self) -> None:
        """W, O, R and A. A transfer that is not made has no length and must not be in the way: it may lie anywhere up
        to the horizon, or before B where its neighbours on the link are before theirs."""
        for a in self.activations:
            self.W[a] = self.rows.new_literal()
            F, B = self.number(Kind.F, a), self.number(Kind.B, a)
            low, high = self.rows.lower[self.E[F]], self.paths.horizon
            if self.keeps_place(a):
                high = max(low, self.rows.upper[self.E[B]] - self.paths.time[B])
            for moments in (self.O, self.R, self.A):
                moments[a] = self.rows.new_variable(low, high)

    def _create_link_orders(self) -> None:
        """K, L and H, each way of a link with an order of its own if it is full duplex.

        The last line of the appendix has H of (b, a) as the negation of H of (a, b). But one is about O of b and R of
        a, the other about O of a and R of b, and both may hold. What excludes each other is H of (a, b) and its own
        negation, in Eq. 12 and 13.
        """
        link = self.costs.link[self.costs.device]
        for a, b in combinations(self.activations, 2):
            if link[a[0]] != link[b[0]]:
                continue
            for order in (self.K, self.L):
                if self.keep_order(a, b) or self.is_over_before(a, b):
                    order[a, b], order[b, a] = TRUE, FALSE
                elif self.is_over_before(b, a):
                    order[a, b], order[b, a] = FALSE, TRUE
                else:
                    order[a, b], order[b, a] = self.new_order()
        for a, b in self.K if self.problem.transfer_mode == "half_duplex" else ():
            if not (self.keep_order(a, b) or self.is_over_before(a, b) or self.is_over_before(b, a)):
                self.H[a, b] = self.rows.new_literal()

    def create_away_literals(self, ops: list[int], leaving: list[Activation], takes: list[int]) -> None:
        """M and N of a device's activations and ops, but for ops that do not run between F and B. `takes`: by op the
        bytes that it takes."""
        for a, y in product(leaving, ops):
            F, B = self.number(Kind.F, a), self.number(Kind.B, a)
            before_forward = y == F or self.paths.precedes(y, F)
            after_backward = y == B or self.paths.precedes(B, y)
            if not before_forward and not after_backward:
                self.N[a, y] = self.rows.new_literal()
                if takes[y]:
                    self.M[a, y] = self.rows.new_literal()

    # --- what rows are made of

    def number(self, kind: Kind, a: Activation) -> int:
        """The number of an activation's F, B or W."""
        return self.paths.number[Op(kind, *a)]

    def transfer_span(self, kind: Kind, a: Activation) -> Span:
        """The length of the whole activation's transfer, all parts together, and whether it is made."""
        return float(self.costs.ms[kind, *a] * self.costs.parts[a[0]] * self.paths.scale), self.W[a]

    # --- known orders of transfers

    def keep_order(self, a: Activation, b: Activation) -> bool:
        """Whether two activations of one stage, a before b, leave in that order and come back in it. They may as well
        where the stage keeps its order in F and in B, as exchanging transfers of equal activations costs nothing."""
        return self.order == "stages" and a[0] == b[0] and a[1] < b[1] and self._are_equal(a[1], b[1])

    def _are_equal(self, i: int, j: int) -> bool:
        return bool(self.costs.class_of[i] == self.costs.class_of[j])

    def is_over_before(self, a: Activation, b: Activation) -> bool:
        """Whether all of a is over before b begins."""
        return self.paths.precedes(self.number(Kind.B, a), self.number(Kind.F, b))

    def keeps_place(self, a: Activation) -> bool:
        """Whether all transfers on a's link are of activations that keep their order: then one that is not made keeps
        its place, too."""
        link = self.costs.link[self.costs.device]
        others = [b for b in self.activations if link[b[0]] == link[a[0]] and b != a]
        return all(self.keep_order(a, b) or self.keep_order(b, a) for b in others)


def stages_that_may_offload(problem: Problem) -> set[int]:
    """Stages whose activations may have to leave: they can, and their device cannot hold all that could be on it at
    once."""
    effects, wanted, classes = Effects(problem), [0] * len(problem.devices), equal_microbatches(problem)
    for route, batches in classes:
        for s in route:
            most = max((each.bytes for each in effects.holdings(s, batches[0], *COMPUTE)), default=0)
            wanted[problem.costs.device[s]] += len(batches) * most
    tight = [size > limit for size, limit in zip(wanted, problem.costs.activation_budget.tolist(), strict=True)]
    return {s for route, _ in classes for s in route if problem.costs.can_offload[s] and tight[problem.costs.device[s]]}
