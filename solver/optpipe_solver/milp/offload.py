"""Offload and reload in OptPipe's program: Eq. 9 to 19, in the paper's letters, one function a family of rows.

Memory follows the program (`optpipe.evaluate.memory`): what stands before an op in its list counts, whatever the clock
says. That takes two things more than the paper has: `A`, the moment at which a reload stands in its program and
allocates (its copy may start later, when the link is free), and `X`, for the memory at such a moment. Memory grows only
where F stands, or R, or a B that leaves more than it found, so only these have a row.

The paper offloads "the activations of (i, j, c)" for any c; what a problem lets leave is what F produced, so O, R and W
are of (i, j).
"""

from __future__ import annotations

from itertools import combinations, product
from typing import TYPE_CHECKING

from optpipe.model.ops import Kind, Op
from optpipe_solver.milp.frame import Activation, Frame
from optpipe_solver.milp.rows import FALSE, TRUE, Literal, Precedence

if TYPE_CHECKING:
    from optpipe_solver.milp.model import Model

Time = tuple[int, float]  # a variable and a constant, which add up


class Offload:
    """Adds the variables and rows to a model that has those of the compute ops. With a frame, only for what it leaves
    open."""

    def __init__(self, model: Model, stages: set[int], frame: Frame | None) -> None:
        self.model, self.problem, self.rows, self.windows, self.frame = (
            model,
            model.problem,
            model.rows,
            model.windows,
            frame,
        )
        self.costs = model.problem.costs
        self.M: dict[tuple[Activation, int], Literal] = {}
        self.N: dict[tuple[Activation, int], Literal] = {}
        self.X: dict[tuple[Activation, Activation], Literal] = {}
        if frame:
            self.activations = [a for a in frame.moves if a[0] in stages or frame.moves[a].made]
        else:
            self.activations = [
                (op.stage, op.microbatch) for op in self.windows.ops if op.kind == Kind.F and op.stage in stages
            ]
        self._choices()
        self._one_after_the_other()
        self._link_order_literals()
        self._own_link()
        self._shared_link()
        if frame:
            self._around_the_window(frame)
        for d, device in enumerate(self.problem.devices):
            own = [x for x in range(len(self.windows.ops)) if self.windows.device[x] == d]
            leaving = [a for a in self.activations if self.costs.device[a[0]] == d]
            held = frame.held[d] if frame else 0
            if held + sum(self._takes(x) for x in own) > device.activation_budget_bytes or (frame and leaving):
                self._away_literals(own, leaving)
                self._drops(leaving)
                self._reloads(leaving)
                self._consistency(leaving)
                self._memory(own, leaving, device.activation_budget_bytes - held)
                self._memory_at_reloads(own, leaving, device.activation_budget_bytes - held)

    def keeps_place(self, a: Activation) -> bool:
        """Whether all transfers on a's link are of activations that keep their order: then one that is not made keeps
        its place, too."""
        link = self.costs.link[self.costs.device]
        others = [b for b in self.activations if link[b[0]] == link[a[0]] and b != a]
        return self.frame is None and all(self.in_order(a, b) or self.in_order(b, a) for b in others)

    # --- the moments

    def _choices(self) -> None:
        """W, O, R and A of every activation that can leave. A transfer that is not made has no length and must not be
        in the way: it may stand anywhere up to the horizon, or before B where its neighbours on the link are before
        theirs."""
        self.W: dict[Activation, Literal] = {}
        self.O: dict[Activation, Time] = {}
        self.R: dict[Activation, Time] = {}
        self.A: dict[Activation, Time] = {}
        for a in self.activations:
            moves = self.frame.moves[a] if self.frame else None
            self.W[a] = TRUE if moves and moves.made else self.rows.literal()
            F, B = self.windows.number.get(Op(Kind.F, *a)), self.windows.number.get(Op(Kind.B, *a))
            low = 0.0 if F is None else self.rows.lower[self.model.E[F]]
            high = self.windows.horizon
            if B is not None and self.keeps_place(a):
                high = max(low, self.rows.upper[self.model.E[B]] - self.windows.time[B])
            for times, known in zip((self.O, self.R, self.A), moves.times if moves else (None,) * 3, strict=True):
                times[a] = self.model.time(known) if known else (self.rows.variable(low, high), 0.0)

    def _end(self, op: Op) -> Time:
        x = self.windows.number.get(op)
        if x is not None:
            return self.model.E[x], 0.0
        assert self.frame, "without a frame every op is in the model"
        var, offset = self.model.time(self.frame.outside(op))
        return var, offset + float(self.costs.ms[op.kind, op.stage]) * self.model.scale

    def _follows(
        self,
        later: Time,
        earlier: Time,
        gap: float = 0.0,
        span: tuple[float, Literal] = (0.0, TRUE),
        when: tuple[Literal, ...] = (),
    ) -> None:
        """The row of a precedence; none between two moments that are known."""
        if later[0] != earlier[0]:
            self.rows.precede(Precedence(later[0], earlier[0], gap + earlier[1] - later[1], span, when))

    def _length(self, kind: Kind, a: Activation) -> tuple[float, Literal]:
        """Time of the whole activation's transfer, all parts together, in the model's unit, and whether it is made."""
        return float(self.costs.ms[kind, a[0]] * self.costs.parts[a[0]] * self.model.scale), self.W[a]

    def _one_after_the_other(self) -> None:
        """F, then O, its drop, R, then B, as section 3.3 tells; the appendix prints no equation for it."""
        for a in self.activations:
            B = Op(Kind.B, *a)
            when = () if self.keeps_place(a) else (self.W[a],)
            self._follows(self.O[a], self._end(Op(Kind.F, *a)))
            self._follows(self.A[a], self.O[a], span=self._length(Kind.O, a))
            self._follows(self.R[a], self.A[a])
            time = float(self.costs.ms[Kind.B, a[0]] * self.model.scale)
            self._follows(self._end(B), self.R[a], time, self._length(Kind.R, a), when)

    # --- one transfer at a time

    def in_order(self, a: Activation, b: Activation) -> bool:
        """Whether two activations of one stage, a before b, leave in that order and come back in it. They may as well
        where the stage keeps its order in F and in B, for exchanging two transfers of equal activations costs
        nothing."""
        same_route = self.problem.route(a[1]) == self.problem.route(b[1])
        return self.model.order == "stages" and a[0] == b[0] and a[1] < b[1] and same_route

    def _apart(self, a: Activation, b: Activation) -> bool:
        """Whether all of a is over before b begins."""
        B, F = self.windows.number.get(Op(Kind.B, *a)), self.windows.number.get(Op(Kind.F, *b))
        return B is not None and F is not None and self.windows.precedes(B, F)

    def _link_order_literals(self) -> None:
        """K, L and H of any two activations whose transfers share a link, each way of the link with an order of its own
        if full duplex.

        The last line of the appendix has H of (b, a) as the negation of H of (a, b); but one is about O of b and R of
        a, the other about O of a and R of b, and both may hold. What excludes each other is H of (a, b) and its own
        negation, in Eq. 12 and 13.
        """
        self.K: dict[tuple[Activation, Activation], Literal] = {}
        self.L: dict[tuple[Activation, Activation], Literal] = {}
        self.H: dict[tuple[Activation, Activation], Literal] = {}
        link = self.costs.link[self.costs.device]
        for a, b in combinations(self.activations, 2):
            if link[a[0]] != link[b[0]]:
                continue
            known = TRUE if self.in_order(a, b) or self._apart(a, b) else FALSE if self._apart(b, a) else None
            for order, times in ((self.K, self.O), (self.L, self.R)):
                fixed = known or self._known_order(times[a], times[b])
                order[a, b], order[b, a] = (fixed, ~fixed) if fixed else self.model.pair()
        if self.problem.transfer_mode == "half_duplex":
            for a, b in self.K:
                if not (self.in_order(a, b) or self._apart(a, b) or self._apart(b, a)):
                    self.H[a, b] = self._known_order(self.O[a], self.R[b]) or self.rows.literal()

    def _known_order(self, a: Time, b: Time) -> Literal | None:
        """What is before the window precedes what is in it, and this what is after it."""
        sides = {self.model.zero: 0, self.model.C: 2} if self.frame else {}
        first, second = (sides.get(var, 1) for var, _ in (a, b))
        if first == second == 1:
            return None
        return TRUE if (first, a[1]) <= (second, b[1]) else FALSE

    def _own_link(self) -> None:
        """Eq. 10 to 13 for the transfers of one device."""
        for a, b in self.K:
            if self.costs.device[a[0]] == self.costs.device[b[0]]:
                self._offload_after_offload(a, b)
                self._reload_after_reload(a, b)
                self._offload_and_reload(a, b)
                self._allocated_in_order(a, b)

    def _shared_link(self) -> None:
        """Eq. 18 and 19: transfers of two devices on one link. As printed these lack their big-M (L alone, at most 1,
        would relax them by one unit of time), have L where K is meant, relate a micro-batch to itself only, and leave
        out O of one device against R of the other. Any two transfers on the link exclude each other, so the rows are
        those of Eq. 10 to 13."""
        for a, b in self.K:
            if self.costs.device[a[0]] != self.costs.device[b[0]]:
                self._offload_after_offload(a, b)
                self._reload_after_reload(a, b)
                self._offload_and_reload(a, b)

    def _offload_after_offload(self, a: Activation, b: Activation) -> None:
        """Eq. 10. A transfer that is not made has no length, so its order needs no (1 - W): only the length is
        multiplied by W."""
        self._sequence(self.O[a], self._length(Kind.O, a), self.O[b], self.K[a, b])

    def _reload_after_reload(self, a: Activation, b: Activation) -> None:
        """Eq. 11, in the same way."""
        self._sequence(self.R[a], self._length(Kind.R, a), self.R[b], self.L[a, b])

    def _offload_and_reload(self, a: Activation, b: Activation) -> None:
        """Eq. 12 and 13, where the link is half duplex: the offload of a before the reload of b, or behind it."""
        if H := self.H.get((a, b)):
            self._sequence(self.O[a], self._length(Kind.O, a), self.R[b], H)
            self._sequence(self.R[b], self._length(Kind.R, b), self.O[a], ~H)

    def _sequence(self, earlier: Time, length: tuple[float, Literal], later: Time, when: Literal) -> None:
        """One transfer behind another. Where one is outside the window, `_around_the_window` sees to it."""
        if not {earlier[0], later[0]} & {self.model.zero, self.model.C}:
            self._follows(later, earlier, span=length, when=(when,))

    def _allocated_in_order(self, a: Activation, b: Activation) -> None:
        """On one device the order of reloads on the link is their order in the program, so they allocate in that order,
        too."""
        self._follows(self.A[b], self.A[a], when=(self.L[a, b], self.W[a], self.W[b]))

    def _around_the_window(self, frame: Frame) -> None:
        """Transfers in the window follow those before it on their link and precede those after it; so does an offload
        its later drop. A reload that stands in the window stands behind the ops before it."""
        for a, (kind, times) in product(self.activations, ((Kind.O, self.O), (Kind.R, self.R))):
            if frame.moves[a].times[kind == Kind.R] is None:
                free, tail = frame.link(self.costs.device[a[0]], kind)
                self._follows(times[a], self.model.time(free), when=(self.W[a],))
                self._follows(self.model.time(tail), times[a], span=self._length(kind, a), when=(self.W[a],))
        for a in self.activations:
            if frame.moves[a].A is None:
                self._follows(self.A[a], self.model.time(frame.done(self.costs.device[a[0]])), when=(self.W[a],))
            if drop := frame.late_drop(a):
                self._follows(self.model.time(drop), self.O[a], span=self._length(Kind.O, a))

    # --- memory

    def _takes(self, x: int) -> int:
        """Bytes that an op allocates at its start."""
        kind, s, *_ = self.windows.ops[x]
        activation, kept = int(self.costs.activation[s]), int(self.costs.saved_for_weight[s])
        return activation if kind == Kind.F else max(0, kept - activation) if kind == Kind.B else 0

    def _delta(self, x: int) -> int:
        """Δ: bytes that an op, once it has ended, leaves more than it found. As printed Δ of B is negative; it need not
        be."""
        kind, s, *_ = self.windows.ops[x]
        activation, kept = int(self.costs.activation[s]), int(self.costs.saved_for_weight[s])
        return activation if kind == Kind.F else kept - activation if kind == Kind.B else -kept

    def _precedes(self, op: Op, y: int) -> Literal:
        """P, also of an op that is before or after the window."""
        x = self.windows.number.get(op)
        if x is not None:
            return self.model.P[x, y]
        assert self.frame, "without a frame every op is in the model"
        return FALSE if self.frame.outside(op).after else TRUE

    def _before_F(self, x: int, a: Activation) -> Literal:
        """Whether x is, or is known to precede, the forward of a."""
        F = self.windows.number.get(Op(Kind.F, *a))
        return TRUE if F is not None and (x == F or self.windows.precedes(x, F)) else FALSE

    def _away_literals(self, own: list[int], leaving: list[Activation]) -> None:
        """M: the drop of a stands before y, N: the reload of a stands before y; in between a is away. M only for those
        that take memory. Neither for ops that do not run between a's F and its B."""
        for a, y in product(leaving, own):
            F, B = (self.windows.number.get(Op(kind, *a)) for kind in (Kind.F, Kind.B))
            if (
                y in (F, B)
                or (F is not None and self.windows.precedes(y, F))
                or (B is not None and self.windows.precedes(B, y))
            ):
                continue
            M, N = self.frame.away(a, self.windows.ops[y], self.W[a]) if self.frame else (None, None)
            self.N[a, y] = N or self.rows.literal()
            if self._takes(y):
                self.M[a, y] = M or self.rows.literal()

    def _drops(self, leaving: list[Activation]) -> None:
        """Eq. 14: what a drop stands before starts when the offload has ended. As printed, y's start is E - T_comm; it
        can only be E - T of y itself."""
        for (a, y), M in self.M.items():
            if a in leaving:
                self._follows(
                    (self.model.E[y], 0.0), self.O[a], float(self.windows.time[y]), self._length(Kind.O, a), when=(M,)
                )

    def _reloads(self, leaving: list[Activation]) -> None:
        """Eq. 15 and 16, for the moment A at which the reload stands: before y, or behind it."""
        for (a, y), N in self.N.items():
            if a in leaving:
                if self.A[a][0] != self.model.C:  # after the window: before y only where y is, too
                    self._follows((self.model.E[y], 0.0), self.A[a], float(self.windows.time[y]), when=(N,))
                self._follows(self.A[a], (self.model.E[y], 0.0), when=(self.W[a], ~N))

    def _consistency(self, leaving: list[Activation]) -> None:
        """Eq. 17: no drop and no reload stands anywhere unless a leaves. Besides, what the paper leaves to Eq. 9 to
        find out: a drop stands behind F and before the reload, the reload before B, and what stands before an op stands
        before the next one."""
        for (a, y), N in self.N.items():
            if a not in leaving:
                continue
            before = self._precedes(Op(Kind.F, *a), y)
            self.rows.clause(~N, self.W[a])
            self.rows.clause(~N, before)
            self.rows.clause(~self.W[a], N, ~self._precedes(Op(Kind.B, *a), y))
            if M := self.M.get((a, y)):
                self.rows.clause(~M, self.W[a])
                self.rows.clause(~N, M)
                self.rows.clause(~M, before)
        for a, order in product(leaving, (self.M, self.N)):
            for x, y, _ in self.windows.arcs:
                if (a, x) in order and (a, y) in order:
                    self.rows.clause(~order[a, x], order[a, y])

    def _memory(self, own: list[int], leaving: list[Activation], limit: int) -> None:
        """Eq. 9: the memory during every op y that takes some. As printed it counts what y leaves, Δ, as what it needs;
        here it needs what it takes at its start, and the others count by what they leave."""
        unit = max(1, abs(limit))  # of the rows
        for y in own:
            if self._takes(y) and not (self.frame and self.frame.is_border(self.windows.ops[y])):
                held = [(self._delta(x) / unit, self.model.P[x, y]) for x in own if x != y]
                away = [
                    (self.costs.offload[a[0]] / unit, self.M[a, y], self.N[a, y]) for a in leaving if (a, y) in self.M
                ]
                moved = [(-size, M) for size, M, _ in away] + [(size, N) for size, _, N in away]
                self.rows.add((), [(-size, literal) for size, literal in held + moved], (self._takes(y) - limit) / unit)

    def _memory_at_reloads(self, own: list[int], leaving: list[Activation], limit: int) -> None:
        """Eq. 9 where a reload stands: between two compute ops, after some drops and before others. The paper has no
        such row; without it a reload could take the bytes that an offload, still under way, frees just in time for the
        next op.

        X: c is away when the reload of b stands, its drop before that and its reload after.
        """
        unit = max(1, abs(limit))
        for b in leaving:
            if self.frame and self.frame.moves[b].A is not None:
                continue  # it stands outside the window
            held, most = [], 0
            for x in own:
                before = self.N.get((b, x))
                literal = ~before if before else self._before_F(x, b)
                if literal != FALSE:
                    held.append((-self._delta(x) / unit, literal))
                    most += self._delta(x) if literal == TRUE else max(0, self._delta(x))
            if most <= limit:
                continue
            for c in leaving:
                if c != b and not (self.in_order(c, b) or self._apart(c, b) or self._apart(b, c)):
                    X = self.rows.literal()
                    self.rows.clause(~X, self.W[c])
                    self.rows.clause(~X, self.L[b, c])
                    F = self.windows.number.get(Op(Kind.F, *c))
                    self.rows.clause(~X, ~self.N.get((b, F), FALSE) if F is not None else TRUE)
                    self._follows(self.A[b], self.O[c], span=self._length(Kind.O, c), when=(X,))
                    self.X[c, b] = X
                    held.append((self.costs.offload[c[0]] / unit, X))
            excess = (most - limit) / unit
            self.rows.add((), [*held, (-excess, self.W[b])], -limit / unit - excess)
