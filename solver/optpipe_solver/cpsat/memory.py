"""What is alive at one time fits, on each device and, where that binds, in its pinned host memory (Eq. 9; the rules are
those of `optpipe.evaluate.memory`)."""

from __future__ import annotations

from optpipe.model.ops import Kind, Op
from optpipe_solver.cpsat.variables import Choice, Moment, Variables

F, B, W, C, O, R, D = Kind.F, Kind.B, Kind.W, Kind.C, Kind.O, Kind.R, Kind.D


def add_memory_capacity(v: Variables) -> None:
    """Adds a cumulative constraint for each memory of each device whose order is open.

    Where the order stays, so does what is alive at one time.
    """
    for d in filter(v.window.opens, range(len(v.problem.devices))):
        own = [(s, j) for s, j in v.passes if v.problem.stages[s].device == d]
        device = _Alive(v)
        for s, j in own:
            device.add_activation(s, j)
            device.add_saved_for_weight(s, j)
        device.add_capacity(v.grid.capacity(d))
        limit = v.grid.host_capacities[d]
        if limit is not None:
            host = _Alive(v)
            for s, j in own:
                host.add_copies(s, j)
            host.add_capacity(limit)


class _Alive:
    """What one memory holds: intervals, and their sizes in grains."""

    def __init__(self, v: Variables) -> None:
        self.v = v
        self.intervals: list[object] = []
        self.sizes: list[int] = []

    def add_activation(self, s: int, j: int) -> None:
        """From F to the end of B, but for parts that leave, between D and R, and for all but the checkpoint, between F
        and C."""
        v, need = self.v, self.v.grid.activations[s]
        forward, gradient = self.start(Op(F, s, j)), self.end(v.backward(s, j))
        again = v.recomputed.get((s, j), False)
        may_leave = [p for p in range(len(need.parts)) if (s, j, p) in v.offloaded and again is not True]
        stays = need.whole - sum(need.parts[p] for p in may_leave)
        if again is False:
            self.lives(forward, gradient, stays)
        else:
            self.lives(forward, gradient, min(stays, need.checkpoint))
            self.lives(forward, gradient, max(0, need.checkpoint - stays), again)
            for since, until in ((forward, self.end(Op(F, s, j))), (self.start(Op(C, s, j)), gradient)):
                self.lives(since, until, max(0, need.whole - need.checkpoint), again)
            if again is not True:
                self.lives(forward, gradient, max(0, stays - need.checkpoint), ~again)
        for p in may_leave:
            leaves, reload = v.offloaded[s, j, p], Op(R, s, j, p)
            self.lives(forward, self.start(Op(D, s, j, p)), need.parts[p], leaves)
            self.lives(self.allocation(reload), gradient, need.parts[p], leaves)
            if leaves is not True:
                self.lives(forward, gradient, need.parts[p], self._neither(leaves, again))

    def _neither(self, leaves: Choice, again: Choice) -> Choice:
        if again is False:
            return ~leaves
        stays = self.v.model.new_bool_var("stays")
        self.v.model.add_exactly_one(leaves, again, stays)
        return stays

    def add_saved_for_weight(self, s: int, j: int) -> None:
        """B allocates what W needs beyond the activation, and W frees what B leaves of it; BW does neither."""
        need, fused = self.v.grid.activations[s], self.v.fused.get((s, j), False)
        if fused is not True:
            b, w = Op(B, s, j), Op(W, s, j)
            more = max(0, need.kept - need.whole)
            self.lives(self.start(b), self.end(b), more, True if fused is False else ~fused)
            self.lives(self.end(b), self.end(w), need.kept)

    def add_copies(self, s: int, j: int) -> None:
        """Pinned host memory, from O to the end of B."""
        need = self.v.grid.activations[s]
        for p in range(len(need.parts)):
            if (s, j, p) in self.v.offloaded:
                self.lives(
                    self.allocation(Op(O, s, j, p)),
                    self.end(self.v.backward(s, j)),
                    need.parts[p],
                    self.v.offloaded[s, j, p],
                )

    # --- moments, with their values in the incumbent; None is after the window

    def start(self, x: Op) -> _Hinted | None:
        return self._hinted(x, self.v.start[x], self.v.incumbent.start.get(x, 0))

    def end(self, x: Op) -> _Hinted | None:
        known = self.v.incumbent.start.get(x, 0) + self.v.duration(x)
        if x.kind == B and (x.stage, x.microbatch) in self.v.incumbent.fused:
            known += self.v.duration(x._replace(kind=W))
        return self._hinted(x, self.v.compute_end[x], known)

    def _hinted(self, x: Op, moment: Moment, known: int) -> _Hinted | None:
        if x in self.v.free:
            return moment, known
        begin = max(known, self.v.window.begin)
        return None if self.v.side(self.v.incumbent_start(x)) > 0 else (begin, begin)

    def allocation(self, x: Op) -> _Hinted | None:
        v = self.v
        if x not in v.allocation:
            return None
        at = v.allocation[x]
        return (v.window.begin, v.window.begin) if isinstance(at, int) else (at, v.hint(at))

    def lives(self, begin: _Hinted | None, end: _Hinted | None, size: int, there: Choice = True) -> None:
        """`size` grains are alive between two moments."""
        if size == 0 or begin is None:
            return
        v = self.v
        (since, known), (until, known_end) = begin, end or (v.latest, v.latest)
        lasts = v.new_int(0, v.latest, max(0, known_end - known), "lasts")
        self.intervals.append(v.model.new_optional_interval_var(since, lasts, until, there, "alive"))
        self.sizes.append(size)

    def add_capacity(self, capacity: int) -> None:
        self.v.model.add_cumulative(self.intervals, self.sizes, capacity)


_Hinted = tuple[Moment, int]
