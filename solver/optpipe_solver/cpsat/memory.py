"""What is alive at one time fits, on each device and, where it binds, in its pinned host memory (the rules of
`optpipe.evaluate.memory`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optpipe.model.ops import Kind, Op

if TYPE_CHECKING:
    from optpipe_solver.cpsat.whole import WindowModel

F, B, W, C, O, R, D = Kind.F, Kind.B, Kind.W, Kind.C, Kind.O, Kind.R, Kind.D
Moment = tuple[Any, int] | None  # when, and when in the incumbent; None after the window


def fits(w: WindowModel) -> None:
    for d in filter(
        w.window.frees, range(len(w.problem.devices))
    ):  # where the order stays, what is alive with what stays, too
        own = [(s, j) for s, j in w.passes if w.problem.stages[s].device == d]
        device = _Alive(w)
        for s, j in own:
            device.activation(s, j)
            device.gradients(s, j)
        device.fit(w.ticks.capacity(d))
        limit = w.ticks.host_capacities[d]
        if limit is not None:
            host = _Alive(w)
            for s, j in own:
                host.copies(s, j)
            host.fit(limit)


class _Alive:
    """What one memory holds: intervals and their sizes in grains."""

    def __init__(self, w: WindowModel) -> None:
        self.w = w
        self.intervals: list[Any] = []
        self.sizes: list[int] = []

    def activation(self, s: int, j: int) -> None:
        """From F to the end of B, but for parts that leave, between D and R, and for all but the checkpoint, between F
        and C."""
        w, need = self.w, self.w.ticks.activations[s]
        forward, gradient = self.at(Op(F, s, j)), self.ended(w.backward(s, j))
        again = w.again.get((s, j), False)
        may_leave = [p for p in range(len(need.parts)) if (s, j, p) in w.leaves and again is not True]
        stays = need.whole - sum(need.parts[p] for p in may_leave)
        if again is False:
            self.lives(forward, gradient, stays)
        else:
            self.lives(forward, gradient, min(stays, need.checkpoint))
            self.lives(forward, gradient, max(0, need.checkpoint - stays), again)
            for since, until in ((forward, self.ended(Op(F, s, j))), (self.at(Op(C, s, j)), gradient)):
                self.lives(since, until, max(0, need.whole - need.checkpoint), again)
            if again is not True:
                self.lives(forward, gradient, max(0, stays - need.checkpoint), ~again)
        for p in may_leave:
            leaves, reload = w.leaves[s, j, p], Op(R, s, j, p)
            self.lives(forward, self.at(Op(D, s, j, p)), need.parts[p], leaves)
            self.lives(self.allocated(reload), gradient, need.parts[p], leaves)
            if leaves is not True:
                self.lives(forward, gradient, need.parts[p], self._neither(leaves, again))

    def _neither(self, leaves: Any, again: Any) -> Any:
        if again is False:
            return ~leaves
        stays = self.w.model.new_bool_var("stays")
        self.w.model.add_exactly_one(leaves, again, stays)
        return stays

    def gradients(self, s: int, j: int) -> None:
        """B allocates what W needs beyond the activation, and W frees what B leaves of it; BW does neither."""
        need, fused = self.w.ticks.activations[s], self.w.fused.get((s, j), False)
        if fused is not True:
            b, w = Op(B, s, j), Op(W, s, j)
            more = max(0, need.kept - need.whole)
            self.lives(self.at(b), self.ended(b), more, True if fused is False else ~fused)
            self.lives(self.ended(b), self.ended(w), need.kept)

    def copies(self, s: int, j: int) -> None:
        """Pinned host memory, from O to the end of B."""
        need = self.w.ticks.activations[s]
        for p in range(len(need.parts)):
            if (s, j, p) in self.w.leaves:
                self.lives(
                    self.allocated(Op(O, s, j, p)),
                    self.ended(self.w.backward(s, j)),
                    need.parts[p],
                    self.w.leaves[s, j, p],
                )

    def at(self, x: Op) -> Moment:
        return self._moment(x, self.w.at[x], self.w.incumbent.start.get(x, 0))

    def ended(self, x: Op) -> Moment:
        known = self.w.incumbent.start.get(x, 0) + self.w.length(x)
        if x.kind == B and (x.stage, x.microbatch) in self.w.incumbent.fused:
            known += self.w.length(x._replace(kind=W))
        return self._moment(x, self.w.ended[x], known)

    def _moment(self, x: Op, moment: Any, known: int) -> Moment:
        if x in self.w.inside:
            return moment, known
        begin = max(known, self.w.window.begin)
        return None if self.w.side(self.w.begins(x)) > 0 else (begin, begin)

    def allocated(self, x: Op) -> Moment:
        w = self.w
        if x not in w.point:
            return None
        at = w.point[x]
        return (w.window.begin, w.window.begin) if isinstance(at, int) else (at, w.hints[at.index])

    def lives(self, begin: Moment, end: Moment, size: int, there: Any = True) -> None:
        """`size` grains are alive between two moments; None is after the window."""
        if size == 0 or begin is None:
            return
        w = self.w
        (since, known), (until, known_end) = begin, end or (w.latest, w.latest)
        lasts = w.variable(0, w.latest, max(0, known_end - known), "lasts")
        self.intervals.append(w.model.new_optional_interval_var(since, lasts, until, there, "alive"))
        self.sizes.append(size)

    def fit(self, capacity: int) -> None:
        self.w.model.add_cumulative(self.intervals, self.sizes, capacity)
