"""The variables of OptPipe's program, in the paper's letters."""

from __future__ import annotations

from itertools import combinations, product

from optpipe.evaluate.effects import Effects
from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe_solver.milp.longest_paths import LongestPaths
from optpipe_solver.milp.precedences import COMPUTE, microbatches_by_route
from optpipe_solver.milp.rows import FALSE, TRUE, Literal, Precedence, Rows
from optpipe_solver.milp.schedule_graph import Activation
from optpipe_solver.milp.surroundings import KnownMoment
from optpipe_solver.milp.switches import Switches

Time = tuple[int, float]  # a variable and a constant, which add up
Span = tuple[float, Literal]  # a length, and whether it counts


class Variables:
    """The variables of a model, and the rows that they are part of. Times are `paths.scale` × ms.

    Compute ops have numbers (`paths.number`). Activations are those that can leave and, with surroundings, may do so in
    the window or are away when it begins or ends.

    Attributes
    ----------
    E
        By op: when it ends.
    C
        The makespan or the span.
    zero
        The moment 0, in a model of a window.
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
        is away. M only for ops that take memory and, of a window, the first op after it.
    X
        By two activations of a device: whether the first is away when the second one's reload allocates.
    """

    def __init__(self, problem: Problem, paths: LongestPaths, switches: Switches, rows: Rows) -> None:
        self.problem, self.costs, self.paths, self.around, self.rows = problem, problem.costs, paths, paths.around, rows
        self.order, self._one_per_pair = switches.order, switches.one_per_pair
        ends = (paths.head + paths.time, paths.horizon - paths.tail + paths.time)
        self.E = [rows.variable(low, max(low, high)) for low, high in zip(*ends, strict=True)]
        self.C = rows.variable(self.around.least_ms * paths.scale if self.around else 0.0, paths.horizon)
        self.zero = rows.variable(0.0, 0.0) if self.around else -1
        self.P: dict[tuple[int, int], Literal] = {}
        self.W: dict[Activation, Literal] = {}
        self.O: dict[Activation, Time] = {}
        self.R: dict[Activation, Time] = {}
        self.A: dict[Activation, Time] = {}
        self.K: dict[tuple[Activation, Activation], Literal] = {}
        self.L: dict[tuple[Activation, Activation], Literal] = {}
        self.H: dict[tuple[Activation, Activation], Literal] = {}
        self.M: dict[tuple[Activation, int], Literal] = {}
        self.N: dict[tuple[Activation, int], Literal] = {}
        self.X: dict[tuple[Activation, Activation], Literal] = {}
        self._compute_orders()
        self.activations = self._activations()
        self._transfer_times()
        self._link_orders()

    # --- new variables

    def pair(self) -> tuple[Literal, Literal]:
        """Eq. 1: whether one precedes the other, and whether the other precedes the one: exactly one of both."""
        first = self.rows.literal()
        if self._one_per_pair:
            return first, ~first
        second = self.rows.literal()
        self.rows.clause(first, second)
        self.rows.clause(~first, ~second)
        return first, second

    def _compute_orders(self) -> None:
        """P; no variable where the order is known. As the k-th W of a stage can always be the W of its k-th B (what a W
        frees is alike), Ws follow the order of their Bs where an order is fixed at all."""
        paths = self.paths
        for x, y in combinations(range(len(paths.ops)), 2):
            if paths.device[x] != paths.device[y]:
                continue
            first, second = paths.ops[x], paths.ops[y]
            if paths.precedes(x, y):
                pair = TRUE, FALSE
            elif paths.precedes(y, x):
                pair = FALSE, TRUE
            elif first.kind == second.kind == Kind.W and first.stage == second.stage and self.order != "none":
                b, c = paths.number[first._replace(kind=Kind.B)], paths.number[second._replace(kind=Kind.B)]
                pair = self.P[b, c], self.P[c, b]
            else:
                pair = self.pair()
            self.P[x, y], self.P[y, x] = pair

    def _activations(self) -> list[Activation]:
        stages = stages_that_may_offload(self.problem)
        if self.around:
            return [a for a, transfers in self.around.transfers.items() if a[0] in stages or transfers.made]
        return [(op.stage, op.microbatch) for op in self.paths.ops if op.kind == Kind.F and op.stage in stages]

    def _transfer_times(self) -> None:
        """W, O, R and A. A transfer that is not made has no length and must not be in the way: it may lie anywhere up
        to the horizon, or before B where its neighbours on the link are before theirs."""
        for a in self.activations:
            transfers = self.around.transfers[a] if self.around else None
            self.W[a] = TRUE if transfers and transfers.made else self.rows.literal()
            F, B = self.number(Kind.F, a), self.number(Kind.B, a)
            low = 0.0 if F is None else self.rows.lower[self.E[F]]
            high = self.paths.horizon
            if B is not None and self.keeps_place(a):
                high = max(low, self.rows.upper[self.E[B]] - self.paths.time[B])
            known_times = transfers.times if transfers else (None,) * 3
            for times, known in zip((self.O, self.R, self.A), known_times, strict=True):
                times[a] = self.time(known) if known else (self.rows.variable(low, high), 0.0)

    def _link_orders(self) -> None:
        """K, L and H, each way of a link with an order of its own if it is full duplex.

        The last line of the appendix has H of (b, a) as the negation of H of (a, b). But one is about O of b and R of
        a, the other about O of a and R of b, and both may hold. What excludes each other is H of (a, b) and its own
        negation, in Eq. 12 and 13.
        """
        link = self.costs.link[self.costs.device]
        for a, b in combinations(self.activations, 2):
            if link[a[0]] != link[b[0]]:
                continue
            known = TRUE if self.in_order(a, b) or self.is_over(a, b) else FALSE if self.is_over(b, a) else None
            for order, times in ((self.K, self.O), (self.L, self.R)):
                fixed = known or self._known_order(times[a], times[b])
                order[a, b], order[b, a] = (fixed, ~fixed) if fixed else self.pair()
        if self.problem.transfer_mode == "half_duplex":
            for a, b in self.K:
                if not (self.in_order(a, b) or self.is_over(a, b) or self.is_over(b, a)):
                    self.H[a, b] = self._known_order(self.O[a], self.R[b]) or self.rows.literal()

    def _known_order(self, a: Time, b: Time) -> Literal | None:
        """What is before the window precedes what is in it, and this what is after it."""
        sides = {self.zero: 0, self.C: 2} if self.around else {}
        first, second = (sides.get(var, 1) for var, _ in (a, b))
        if first == second == 1:
            return None
        return TRUE if (first, a[1]) <= (second, b[1]) else FALSE

    def new_away_literals(self, ops: list[int], leaving: list[Activation], takes: list[bool]) -> None:
        """M and N of a device's activations and ops, but for ops that do not run between F and B. `takes`: by op
        whether it takes memory."""
        for a, y in product(leaving, ops):
            F, B = self.number(Kind.F, a), self.number(Kind.B, a)
            before = F is not None and (y == F or self.paths.precedes(y, F))
            after = B is not None and (y == B or self.paths.precedes(B, y))
            if before or after:
                continue
            known = self.around.away_literals(a, self.paths.ops[y], self.W[a]) if self.around else (None, None)
            self.N[a, y] = known[1] or self.rows.literal()
            # What was dropped before the first op after a window still must be: memory there stays as it was.
            if takes[y] or (self.around and self.around.is_border(self.paths.ops[y])):
                self.M[a, y] = known[0] or self.rows.literal()

    # --- moments

    def number(self, kind: Kind, a: Activation) -> int | None:
        """The number of an activation's F, B or W; None where it is outside the window."""
        return self.paths.number.get(Op(kind, *a))

    def time(self, known: KnownMoment) -> Time:
        """A moment outside the window: a constant, or C less a constant."""
        ms = known.ms * self.paths.scale
        return (self.C, -ms) if known.after else (self.zero, ms)

    def end(self, op: Op) -> Time:
        """When a compute op ends, in the window or outside."""
        x = self.paths.number.get(op)
        if x is not None:
            return self.E[x], 0.0
        assert self.around, "without surroundings every op is in the model"
        var, offset = self.time(self.around.known_start(op))
        return var, offset + float(self.costs.ms[op.kind, op.stage]) * self.paths.scale

    def precedes(self, op: Op, y: int) -> Literal:
        """P, also of an op that is before or after the window."""
        x = self.paths.number.get(op)
        if x is not None:
            return self.P[x, y]
        assert self.around, "without surroundings every op is in the model"
        return FALSE if self.around.known_start(op).after else TRUE

    def transfer_span(self, kind: Kind, a: Activation) -> Span:
        """The length of the whole activation's transfer, all parts together, and whether it is made."""
        return float(self.costs.ms[kind, a[0]] * self.costs.parts[a[0]] * self.paths.scale), self.W[a]

    def add_follows(
        self, later: Time, earlier: Time, gap: float = 0.0, span: Span = (0.0, TRUE), when: tuple[Literal, ...] = ()
    ) -> None:
        """Adds the row `later >= earlier + gap + span`; none between two moments that are known."""
        if later[0] != earlier[0]:
            self.rows.precede(Precedence(later[0], earlier[0], gap + earlier[1] - later[1], span, when))

    # --- known orders of transfers

    def in_order(self, a: Activation, b: Activation) -> bool:
        """Whether two activations of one stage, a before b, leave in that order and come back in it. They may as well
        where the stage keeps its order in F and in B, as exchanging transfers of equal activations costs nothing."""
        same_route = self.problem.route(a[1]) == self.problem.route(b[1])
        return self.order == "stages" and a[0] == b[0] and a[1] < b[1] and same_route

    def is_over(self, a: Activation, b: Activation) -> bool:
        """Whether all of a is over before b begins."""
        B, F = self.number(Kind.B, a), self.number(Kind.F, b)
        return B is not None and F is not None and self.paths.precedes(B, F)

    def keeps_place(self, a: Activation) -> bool:
        """Whether all transfers on a's link are of activations that keep their order: then one that is not made keeps
        its place, too."""
        link = self.costs.link[self.costs.device]
        others = [b for b in self.activations if link[b[0]] == link[a[0]] and b != a]
        return self.around is None and all(self.in_order(a, b) or self.in_order(b, a) for b in others)


def stages_that_may_offload(problem: Problem) -> set[int]:
    """Stages whose activations may have to leave: they can, and their device cannot hold all that could be on it at
    once."""
    effects, wanted, routes = Effects(problem), [0] * len(problem.devices), microbatches_by_route(problem)
    for route, batches in routes.items():
        for s in route:
            levels = effects.levels(s, *COMPUTE)
            wanted[problem.costs.device[s]] += len(batches) * max((level.bytes for level in levels), default=0)
    tight = [size > limit for size, limit in zip(wanted, problem.costs.activation_budget.tolist(), strict=True)]
    return {s for route in routes for s in route if problem.costs.can_offload[s] and tight[problem.costs.device[s]]}
