"""What is held at one time fits, on each device and, where that binds, in its host memory (Eq. 9).

What ops take and free is read from `optpipe.evaluate.effects`, through the grid.
"""

from __future__ import annotations

from collections import Counter

from optpipe.model.ops import Kind, Op
from optpipe_solver.cpsat.grid import Grid
from optpipe_solver.cpsat.variables import Choice, Moment, Variables

F, B, W, C, O, R, D = Kind.F, Kind.B, Kind.W, Kind.C, Kind.O, Kind.R, Kind.D
Point = tuple[Kind, bool]  # the start of an activation's op, or (True) its end
FORWARD, GRADIENT = (F, False), (B, True)
Hinted = tuple[Moment, int]  # a moment, and its value in the incumbent


def add_memory_capacity(v: Variables) -> None:
    """Adds a cumulative constraint for each memory of each device whose order is open.

    Where the order stays, so does what is held at one time.
    """
    for d in filter(v.window.opens, range(len(v.problem.devices))):
        own = [(s, j) for s, j in v.passes if v.problem.stages[s].device == d]
        device = _Held(v)
        for s, j in own:
            device.add_activation(s, j)
        device.add_capacity(v.grid.capacity(d))
        limit = v.grid.host_capacities[d]
        if limit is not None:
            host = _Held(v)
            for s, j in own:
                host.add_copies(s, j)
            host.add_capacity(limit)


def held_between(grid: Grid, stage: int, recomputed: bool, fused: bool) -> Counter[tuple[Point, Point]]:
    """The grains that an activation holds from one point to another, if no part of it leaves.

    They add up to the levels of `Grid.levels`: what is taken last is freed first, and all is counted anew when the
    input gradient ends. The end of a BW is that of its B.
    """
    kinds = (F, *((C,) if recomputed else ()), *((Kind.BW,) if fused else (B, W)))
    level = {(kind, ended): grains for kind, ended, grains in grid.levels(stage, *kinds, recomputed=recomputed)}
    found: Counter[tuple[Point, Point]] = Counter()
    since: list[tuple[Point, int]] = []
    held = 0
    for kind, ended in ((kind, ended) for kind in kinds for ended in (False, True)):
        now, point = level.get((kind, ended), held), (B if kind == Kind.BW else kind, ended)
        freed = held if point == GRADIENT else held - now
        while freed > 0:
            begin, grains = since.pop()
            found[begin, point] += min(grains, freed)
            if grains > freed:
                since.append((begin, grains - freed))
            freed -= grains
        taken = now if point == GRADIENT else now - held
        if taken > 0:
            since.append((point, taken))
        held = now
    return found


class _Held:
    """What one memory holds: intervals, and their sizes in grains."""

    def __init__(self, v: Variables) -> None:
        self.v = v
        self.intervals: list[object] = []
        self.sizes: list[int] = []

    def add_activation(self, s: int, j: int) -> None:
        """What the activation holds with each choice. Of parts that may leave, each is counted on its own: until D, and
        from R on."""
        v, recomputed, fused = self.v, self.v.recomputed.get((s, j), False), self.v.fused.get((s, j), False)
        leaving = {p: size for p, size in enumerate(v.grid.parts[s]) if (s, j, p) in v.offloaded}
        if recomputed is True:
            leaving = {}
        amounts = {(a, f): held_between(v.grid, s, a, f) for a in _values(recomputed) for f in _values(fused)}
        for (a, _), amount in amounts.items():
            amount[FORWARD, GRADIENT] -= 0 if a else sum(leaving.values())
        for points in dict.fromkeys(points for amount in amounts.values() for points in amount):
            self._add_by_choice(s, j, points, {choice: amount[points] for choice, amount in amounts.items()})
        forward, gradient = self._moment(s, j, FORWARD), self._moment(s, j, GRADIENT, of_forward=True)
        for p, size in leaving.items():
            offloaded = v.offloaded[s, j, p]
            self._add(forward, self._start(Op(D, s, j, p)), size, offloaded)
            self._add(self._allocation(Op(R, s, j, p)), gradient, size, offloaded)
            if offloaded is not True:
                self._add(forward, gradient, size, self._neither(offloaded, recomputed))

    def _add_by_choice(
        self, s: int, j: int, points: tuple[Point, Point], amounts: dict[tuple[bool, bool], int]
    ) -> None:
        """Grains that are held between two points, by whether the activation is recomputed and its backward fused."""
        begin, end = self._moment(s, j, points[0]), self._moment(s, j, points[1], of_forward=points[0][0] in (F, C))
        least = {a: min(size for (b, _), size in amounts.items() if a == b) for a, _ in amounts}
        always = min(least.values())
        self._add(begin, end, always)
        for a, size in least.items():
            self._add(begin, end, size - always, _literal(self.v.recomputed.get((s, j), False), a))
        for fused in dict.fromkeys(f for _, f in amounts):
            (more,) = {size - least[a] for (a, f), size in amounts.items() if f == fused}
            self._add(begin, end, more, _literal(self.v.fused.get((s, j), False), fused))

    def _neither(self, offloaded: Choice, recomputed: Choice) -> Choice:
        if recomputed is False:
            return ~offloaded
        stays = self.v.model.new_bool_var("stays")
        self.v.model.add_exactly_one(offloaded, recomputed, stays)
        return stays

    def add_copies(self, s: int, j: int) -> None:
        """Parts in host memory, from O to the end of B."""
        for p, size in enumerate(self.v.grid.parts[s]):
            if (s, j, p) in self.v.offloaded:
                begin, end = self._allocation(Op(O, s, j, p)), self._moment(s, j, GRADIENT, of_forward=True)
                self._add(begin, end, size, self.v.offloaded[s, j, p])

    def add_capacity(self, capacity: int) -> None:
        """No more than this is held at one time."""
        self.v.model.add_cumulative(self.intervals, self.sizes, capacity)

    def _add(self, begin: Hinted | None, end: Hinted | None, size: int, presence: Choice = True) -> None:
        """`size` grains are held between two moments; None is after the window."""
        if size == 0 or begin is None:
            return
        v = self.v
        (since, known), (until, known_end) = begin, end or (v.latest, v.latest)
        lasts = v.new_int(0, v.latest, max(0, known_end - known), "lasts")
        self.intervals.append(v.model.new_optional_interval_var(since, lasts, until, presence, "held"))
        self.sizes.append(size)

    # --- moments; None is after the window

    def _moment(self, s: int, j: int, point: Point, of_forward: bool = False) -> Hinted | None:
        """A point of an activation's op; `of_forward`: of the backward of this forward (see `Variables.backward`)."""
        kind, ended = point
        op = self.v.backward(s, j) if of_forward and kind == B else Op(kind, s, j)
        return self._end(op) if ended else self._start(op)

    def _start(self, x: Op) -> Hinted | None:
        return self._hinted(x, self.v.start[x], self.v.incumbent.start.get(x, 0))

    def _end(self, x: Op) -> Hinted | None:
        known = self.v.incumbent.start.get(x, 0) + self.v.duration(x)
        if x.kind == B and (x.stage, x.microbatch) in self.v.incumbent.fused:
            known += self.v.duration(x._replace(kind=W))
        return self._hinted(x, self.v.compute_end[x], known)

    def _hinted(self, x: Op, moment: Moment, known: int) -> Hinted | None:
        if x in self.v.free:
            return moment, known
        begin = max(known, self.v.window.begin)
        return None if self.v.side(self.v.incumbent_start(x)) > 0 else (begin, begin)

    def _allocation(self, x: Op) -> Hinted | None:
        if x not in self.v.allocation:
            return None
        at = self.v.allocation[x]
        return (self.v.window.begin,) * 2 if isinstance(at, int) else (at, self.v.hint(at))


def _values(choice: Choice) -> tuple[bool, ...]:
    """The values that a choice may have."""
    return (choice,) if isinstance(choice, bool) else (False, True)


def _literal(choice: Choice, value: bool) -> Choice:
    """Whether a choice has this value."""
    return value == choice if isinstance(choice, bool) else choice if value else ~choice
