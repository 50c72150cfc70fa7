"""Offload and reload in OptPipe's program: Eq. 9 to 19, in the paper's letters.

Memory follows the program (`optpipe.memory`): what stands before an op in its list counts, whatever the clock says. That takes two things
more than the paper has: `A`, the moment at which a reload stands in its program and allocates (its copy may start later, when the link is
free), and `X`, for the memory at such a moment. Memory grows only where F stands, or R, or a B that leaves more than it found, so only
these have a row.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from optpipe.ops import Kind, Op
from optpipe_solver.milp.rows import FALSE, TRUE, Literal, Precedence

if TYPE_CHECKING:
    from optpipe_solver.milp.model import Model

Activation = tuple[int, int]  # stage and micro-batch


class Offload:
    """Adds the variables and rows to a model that has those of the compute ops."""

    def __init__(self, model: Model, stages: set[int]) -> None:
        self.model, self.problem, self.rows, self.windows = model, model.problem, model.rows, model.windows
        self.costs = model.problem.costs
        self.M: dict[tuple[Activation, int], Literal] = {}
        self.N: dict[tuple[Activation, int], Literal] = {}
        self.X: dict[tuple[Activation, Activation], Literal] = {}
        self.activations = [(op.stage, op.microbatch) for op in self.windows.ops if op.kind == Kind.F and op.stage in stages]
        self._choices()
        self._transfers()
        self._synchronization()
        for d, device in enumerate(self.problem.devices):
            own = [x for x in range(len(self.windows.ops)) if self.windows.device[x] == d]
            leaving = [a for a in self.activations if self.costs.device[a[0]] == d]
            if sum(self._takes(x) for x in own) > device.memory_bytes:
                self._during_compute(own, leaving, device.memory_bytes)
                self._during_reload(own, leaving, device.memory_bytes)

    def keeps_place(self, a: Activation) -> bool:
        """Whether all transfers on a's link are of activations that keep their order: then one that is not made keeps its place, too."""
        link = self.costs.link[self.costs.device]
        others = [b for b in self.activations if link[b[0]] == link[a[0]] and b != a]
        return all(self._in_order(a, b) or self._in_order(b, a) for b in others)

    def _F(self, a: Activation) -> int:
        return self.windows.number[Op(Kind.F, *a)]

    def _B(self, a: Activation) -> int:
        return self.windows.number[Op(Kind.B, *a)]

    def _ms(self, kind: Kind, a: Activation) -> float:
        """Time of the whole activation's transfer, all parts together, in the model's unit."""
        return float(self.costs.ms[kind, a[0]] * self.costs.parts[a[0]] * self.model.scale)

    def _takes(self, x: int) -> int:
        """Bytes that an op allocates at its start."""
        kind, s, *_ = self.windows.ops[x]
        activation, kept = int(self.costs.activation[s]), int(self.costs.weight_grad[s])
        return activation if kind == Kind.F else max(0, kept - activation) if kind == Kind.B else 0

    def _delta(self, x: int) -> int:
        """Δ: bytes that an op, once it has ended, leaves more than it found."""
        kind, s, *_ = self.windows.ops[x]
        activation, kept = int(self.costs.activation[s]), int(self.costs.weight_grad[s])
        return activation if kind == Kind.F else kept - activation if kind == Kind.B else -kept

    def _in_order(self, a: Activation, b: Activation) -> bool:
        """Whether two activations of one stage, a before b, leave in that order and come back in it. They may as well where the stage
        keeps its order in F and in B, for exchanging two transfers of equal activations costs nothing."""
        same_route = self.problem.route(a[1]) == self.problem.route(b[1])
        return self.model.order == "stages" and a[0] == b[0] and a[1] < b[1] and same_route

    def _apart(self, a: Activation, b: Activation) -> bool:
        """Whether all of a is over before b begins."""
        return self.windows.precedes(self._B(a), self._F(b))

    def _choices(self) -> None:
        """W, O, R and A of every activation that can leave. A transfer that is not made has no length and must not be in the way: it may
        stand anywhere up to the horizon, or before B where its neighbours on the link are before theirs."""
        self.W: dict[Activation, Literal] = {a: self.rows.literal() for a in self.activations}
        self.O: dict[Activation, int] = {}
        self.R: dict[Activation, int] = {}
        self.A: dict[Activation, int] = {}
        for a in self.activations:
            F, B = self._F(a), self._B(a)
            low, high = self.rows.lower[self.model.E[F]], self.rows.upper[self.model.E[B]] - self.windows.time[B]
            for times in (self.O, self.R, self.A):
                times[a] = self.rows.variable(low, float(max(low, high)) if self.keeps_place(a) else self.windows.horizon)

    def _transfers(self) -> None:
        """Eq. 10 to 13, and Eq. 18 and 19 for devices that share a link: one transfer at a time, either way, or each way if full duplex.

        As a transfer that is not made has no length, its order needs no (1 - W). As printed, Eq. 18 and 19 lack their big-M, and relate
        a micro-batch to itself only; any two transfers on the link exclude each other. Nor is H of (b, a) the negation of H of (a, b), as
        the last line of the appendix has it: one is about O of b and R of a, the other about O of a and R of b. On one device the order
        of reloads on the link is their order in the program, so they allocate in that order, too.
        """
        self.K: dict[tuple[Activation, Activation], Literal] = {}
        self.L: dict[tuple[Activation, Activation], Literal] = {}
        self.H: dict[tuple[Activation, Activation], Literal] = {}
        link = self.costs.link[self.costs.device]
        for a, b in combinations(self.activations, 2):
            if link[a[0]] != link[b[0]]:
                continue
            known = TRUE if self._in_order(a, b) or self._apart(a, b) else FALSE if self._apart(b, a) else None
            for order in (self.K, self.L):
                order[a, b], order[b, a] = (known, ~known) if known else self.model.pair()
        for a, b in self.K:
            self._sequence(self.O[a], self._length(Kind.O, a), self.O[b], self.K[a, b])
            self._sequence(self.R[a], self._length(Kind.R, a), self.R[b], self.L[a, b])
            if self.costs.device[a[0]] == self.costs.device[b[0]]:
                self.rows.precede(Precedence(self.A[b], self.A[a], when=(self.L[a, b], self.W[a], self.W[b])))
            if self.problem.transfer_mode == "half_duplex" and not (self._in_order(a, b) or self._apart(a, b) or self._apart(b, a)):
                H = self.H[a, b] = self.rows.literal()
                self._sequence(self.O[a], self._length(Kind.O, a), self.R[b], H)
                self._sequence(self.R[b], self._length(Kind.R, b), self.O[a], ~H)

    def _length(self, kind: Kind, a: Activation) -> tuple[float, Literal]:
        return self._ms(kind, a), self.W[a]

    def _sequence(self, earlier: int, length: tuple[float, Literal], later: int, when: Literal) -> None:
        self.rows.precede(Precedence(later, earlier, span=length, when=(when,)))

    def _synchronization(self) -> None:
        """F, then O, its drop, R, then B, as section 3.3 tells; the appendix prints no equation for it."""
        for a in self.activations:
            E, time = self.model.E, self.windows.time[self._B(a)]
            self.rows.precede(Precedence(self.O[a], E[self._F(a)]))
            self.rows.precede(Precedence(self.A[a], self.O[a], span=self._length(Kind.O, a)))
            self.rows.precede(Precedence(self.R[a], self.A[a]))
            when = () if self.keeps_place(a) else (self.W[a],)
            self.rows.precede(Precedence(E[self._B(a)], self.R[a], float(time), self._length(Kind.R, a), when))

    def _between(self, own: list[int], a: Activation) -> list[int]:
        """Ops of a's device that may run between its F and its B."""
        precedes, F, B = self.windows.precedes, self._F(a), self._B(a)
        return [y for y in own if y not in (F, B) and not precedes(y, F) and not precedes(B, y)]

    def _during_compute(self, own: list[int], leaving: list[Activation], limit: int) -> None:
        """Eq. 9 and 14 to 17: the memory during every op y that takes some.

        M: the drop of a stands before y, N: the reload of a stands before y; in between a is away. As printed, the signs in Eq. 9 count
        what an op leaves as what it needs; here it needs what it takes at its start. Eq. 14's T_comm can only be y's own time: y starts
        when the offload has ended. Eq. 15 and 16 hold for the moment A at which the reload stands: before y, or behind it.
        """
        E, P, time = self.model.E, self.model.P, self.windows.time
        for a in leaving:
            between, W, F, B = self._between(own, a), self.W[a], self._F(a), self._B(a)
            for y in between:
                N = self.N[a, y] = self.rows.literal()
                self.rows.clause(~N, W)
                self.rows.clause(~N, P[F, y])
                self.rows.clause(~W, N, P[y, B])
                self.rows.precede(Precedence(E[y], self.A[a], float(time[y]), when=(N,)))
                self.rows.precede(Precedence(self.A[a], E[y], when=(W, ~N)))
                if self._takes(y):
                    M = self.M[a, y] = self.rows.literal()
                    self.rows.clause(~M, W)
                    self.rows.clause(~N, M)
                    self.rows.clause(~M, P[F, y])
                    self.rows.precede(Precedence(E[y], self.O[a], float(time[y]), self._length(Kind.O, a), when=(M,)))
            for order in (self.M, self.N):  # what stands before an op stands before the next one
                for x, y, _ in self.windows.arcs:
                    if (a, x) in order and (a, y) in order:
                        self.rows.clause(~order[a, x], order[a, y])
        unit = max(1, limit)  # of the rows
        for y in own:
            if self._takes(y):
                held = [(self._delta(x) / unit, P[x, y]) for x in own if x != y]
                away = [(self.costs.offload[a[0]] / unit, self.M[a, y], self.N[a, y]) for a in leaving if (a, y) in self.M]
                moved = [(-size, M) for size, M, _ in away] + [(size, N) for size, _, N in away]
                self.rows.add((), [(-size, literal) for size, literal in held + moved], (self._takes(y) - limit) / unit)

    def _during_reload(self, own: list[int], leaving: list[Activation], limit: int) -> None:
        """Eq. 9 where a reload stands: between two compute ops, after some drops and before others. The paper has no such row; without it
        a reload could take the bytes that an offload, still under way, frees just in time for the next op.

        X: c is away when the reload of b stands, its drop before that and its reload after.
        """
        unit = max(1, limit)
        for b in leaving:
            held, most = [], 0
            for x in own:
                before = self.N.get((b, x))
                literal = ~before if before else TRUE if x == self._F(b) or self.windows.precedes(x, self._F(b)) else FALSE
                if literal != FALSE:
                    held.append((-self._delta(x) / unit, literal))
                    most += self._delta(x) if literal == TRUE else max(0, self._delta(x))
            if most <= limit:
                continue
            for c in leaving:
                if c != b and not (self._in_order(c, b) or self._apart(c, b) or self._apart(b, c)):
                    X = self.rows.literal()
                    self.rows.clause(~X, self.W[c])
                    self.rows.clause(~X, self.L[b, c])
                    self.rows.clause(~X, ~self.N.get((b, self._F(c)), FALSE))
                    self.rows.precede(Precedence(self.A[b], self.O[c], span=self._length(Kind.O, c), when=(X,)))
                    self.X[c, b] = X
                    held.append((self.costs.offload[c[0]] / unit, X))
            excess = (most - limit) / unit
            self.rows.add((), [*held, (-excess, self.W[b])], -limit / unit - excess)
