"""What limits a model: the memory of each device and, where that binds, of its host (Eq. 9); and spans (Eq. 3).

Sizes are in grains, times in ticks of the grid (`Grid`), which reads what ops take and free from
`optpipe.evaluate.effects`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from ortools.sat.python import cp_model

from optpipe.model.ops import COMPUTE, Kind, Op
from optpipe_solver.cpsat.grid import AT_PEER, Grid, moves
from optpipe_solver.cpsat.variables import Choice, Moment, Window, WindowVariables

F, B, W, BW, C, O, D, A, V = Kind.F, Kind.B, Kind.W, Kind.BW, Kind.C, Kind.O, Kind.D, Kind.A, Kind.V


class Point(NamedTuple):
    """Where the memory of an activation may change: when an op of it starts, or ends."""

    kind: Kind
    is_end: bool
    level: int = 0  # of a C


class Between(NamedTuple):
    """From one point of an activation to another."""

    begin: Point
    end: Point


class HintedMoment(NamedTuple):
    """A moment of the model, and when it is in the incumbent."""

    moment: Moment
    hint: int


FORWARD_START, GRADIENT_END = Point(F, is_end=False), Point(B, is_end=True)


def limit_device_memory(v: WindowVariables) -> None:
    """A cumulative constraint for each device whose order is open. Where the order stays, so does what is held."""
    for d in filter(v.window.opens, range(len(v.problem.devices))):
        held = _Held(v)
        for s, j in v.passes_on(d):
            held.add_activation(s, j)
        for s, j, p in v.offloaded:
            if p == AT_PEER and v.peer(s) == d:
                held.add_room(s, j)
        held.limit_to(v.grid.capacity(d))


def limit_host_memory(v: WindowVariables) -> None:
    """Likewise, for the devices of each node whose host memory may not hold all copies at once: what they pin at most
    adds up to no more."""
    node, whole = v.problem.costs.node.tolist(), v.window == Window.of_all(v.incumbent)
    for n in dict.fromkeys(node):
        devices = [d for d, other in enumerate(node) if other == n]
        limit = v.grid.host_capacities[devices[0]]
        if limit is None:
            continue
        least = {d: 0 if whole else v.incumbent.pinned[d] for d in devices}  # what is outside the window stays
        left = max(0, limit - sum(least.values()))  # rounded up, there may be more than fits
        most = (
            {d: least[d] + v.new_int(0, left, v.incumbent.pinned[d] - least[d], f"pins{d}") for d in devices}
            if len(devices) > 1
            else {}
        )
        if most:
            v.model.add(sum(most.values()) <= left + sum(least.values()))
        for d in filter(v.window.opens, devices):
            copies = _Held(v)
            for s, j in v.passes_on(d):
                copies.add_copies(s, j)
            copies.limit_to(most.get(d, limit))


def limit_spans(v: WindowVariables) -> None:
    """`v.span` is no shorter than the time from each device's first forward to its last weight gradient (Eq. 3).

    A simulated schedule starts everything as soon as it can, so the model must not gain by starting a device late: what
    a device computes first, a forward, starts at once.
    """
    at_once: dict[Op, Choice] = {}
    for d in range(len(v.problem.devices)):
        forwards = [Op(F, s, j) for s, j in v.passes_on(d)]
        if not forwards:
            continue
        begin = v.new_int(0, v.latest, min(v.incumbent.start[x] for x in forwards), f"begin{d}")
        first = [v.model.new_bool_var(f"{x}first") for x in forwards]
        v.model.add_exactly_one(first)
        for x, leads in zip(forwards, first, strict=True):
            v.model.add(begin <= v.start[x])
            v.model.add(begin == v.start[x]).only_enforce_if(leads)
            v.model.add_implication(leads, _starts_at_once(v, x, at_once))
            v.model.add(v.span >= v.compute_end[x._replace(kind=W)] - begin)


def _starts_at_once(v: WindowVariables, x: Op, literals: dict[Op, Choice]) -> Choice:
    """A literal for whether a forward starts as soon as its message has come or the op before it has ended; the same
    for the same op.

    Forwards that hold each other up are followed to the first one. Of other ops it is not asked whether they could have
    ended sooner. So the model's span is a lower bound of the simulated one, and nearly always equal to it.
    """
    if x in literals:
        return literals[x]
    at_once = literals[x] = v.model.new_bool_var(f"{x}atonce")
    route = v.problem.route(x.microbatch)

    def reasons() -> Iterator[tuple[Moment | int, Choice]]:
        """Moments, at one of which x starts while something else holds."""
        if x.stage == route[0]:
            yield 0, True
        else:
            before = Op(F, route[route.index(x.stage) - 1], x.microbatch)
            arrival = v.compute_end[before] + v.grid.forward_delay(x.stage, x.microbatch)
            yield arrival, _starts_at_once(v, before, literals)
        for y in v.free:
            if y != x and v.device(y) == v.device(x) and y.kind in (*COMPUTE, D, V):
                also = _starts_at_once(v, y, literals) if y.kind == F else v.presence(y)
                yield v.compute_end.get(y, v.start[y]), also

    holds = []
    for moment, also in reasons():
        literal = v.model.new_bool_var("reason")
        v.model.add(v.start[x] == moment).only_enforce_if(literal)
        if also is not True:
            v.model.add_implication(literal, also)
        holds.append(literal)
    v.model.add_bool_or(holds).only_enforce_if(at_once)
    return at_once


def held_between(grid: Grid, stage: int, microbatch: int, level: int, fused: bool) -> Counter[Between]:
    """The grains that an activation holds from one point to another, if no part of it leaves; `level` is that by which
    it is recomputed, or `NONE`.

    They add up to those of `Grid.holdings`: what is taken last is freed first, and all is counted anew when the
    input gradient ends. The end of a BW is that of its B.
    """
    kinds = (F, *((C,) if level >= 0 else ()), *((BW,) if fused else (B, W)))
    holdings = grid.holdings(stage, microbatch, *kinds, level=level)
    holding = {(kind, ended): grains for kind, ended, grains in holdings}
    amounts: Counter[Between] = Counter()
    taken: list[tuple[Point, int]] = []  # where, and how many grains of that are still held
    held = 0
    for kind, is_end in ((kind, is_end) for kind in kinds for is_end in (False, True)):
        now = holding.get((kind, is_end), held)
        point = Point(B if kind == BW else kind, is_end, level if kind == C else 0)
        to_free = held if point == GRADIENT_END else held - now
        while to_free > 0:
            begin, grains = taken.pop()
            amounts[Between(begin, point)] += min(grains, to_free)
            if grains > to_free:
                taken.append((begin, grains - to_free))
            to_free -= grains
        to_take = now if point == GRADIENT_END else now - held
        if to_take > 0:
            taken.append((point, to_take))
        held = now
    return amounts


class _Held:
    """What one memory holds: intervals, and their sizes in grains. Moments after the window are None."""

    def __init__(self, v: WindowVariables) -> None:
        self._v = v
        self._intervals: list[object] = []
        self._sizes: list[int] = []

    def limit_to(self, capacity: cp_model.LinearExprT) -> None:
        """No more than this is held at one time."""
        self._v.model.add_cumulative(self._intervals, self._sizes, capacity)

    def add_activation(self, s: int, j: int) -> None:
        """What the activation holds by how it is recomputed, and whether its backward is fused. Parts that may leave
        are each counted alone: until D, and from R on."""
        v, levels, fused = self._v, self._v.level[s, j], self._v.fused.get((s, j), False)
        fusing: dict[bool, Choice] = {fused: True} if isinstance(fused, bool) else {False: ~fused, True: fused}
        leaving: dict[int, dict[int, int]] = {level: {} for level in levels}
        for p, size in v.grid.parts(s, j).items():
            if (s, j, p) in v.offloaded and (level := v.grid.level_of_part(s, p)) in levels:
                leaving[level][p] = size
        amounts = {(a, f): held_between(v.grid, s, j, a, f) for a in levels for f in fusing}
        whole = Between(FORWARD_START, GRADIENT_END)
        for (level, _), amount in amounts.items():
            # Rounded down, the parts may hold more than the sum: still no more than there is.
            amount[whole] = max(0, amount[whole] - sum(leaving[level].values()))
        for between in dict.fromkeys(between for amount in amounts.values() for between in amount):
            sizes = {choice: amount[between] for choice, amount in amounts.items()}
            of_forward = between.begin.kind in (F, C)
            begin, end = self._moment(s, j, between.begin), self._moment(s, j, between.end, of_forward)
            least = {a: min(size for (b, _), size in sizes.items() if a == b) for a in levels}
            always = min(least.values())
            self._add(begin, end, always)
            for level, size in least.items():
                self._add(begin, end, size - always, levels[level])
            for is_fused, presence in fusing.items():
                # What fusing adds is the same whether recomputed or not.
                (further,) = {size - least[a] for (a, f), size in sizes.items() if f == is_fused}
                self._add(begin, end, further, presence)
        for level, parts in leaving.items():
            for p, size in parts.items():
                self._add_part(s, j, p, size, level)

    def add_copies(self, s: int, j: int) -> None:
        """Parts in host memory, from O to the end of B."""
        for p, size in self._v.grid.parts(s, j).items():
            if p != AT_PEER and (s, j, p) in self._v.offloaded:
                begin, end = self._allocation(Op(O, s, j, p)), self._end(self._v.backward(s, j))
                self._add(begin, end, size, self._v.offloaded[s, j, p])

    def add_room(self, s: int, j: int) -> None:
        """What is evicted from another device, from A to V."""
        begin, end = (self._start(Op(kind, s, j, AT_PEER)) for kind in (A, V))
        self._add(begin, end, self._v.grid.parts(s, j)[AT_PEER], self._v.offloaded[s, j, AT_PEER])

    def _add_part(self, s: int, j: int, p: int, size: int, level: int) -> None:
        """A part that may leave: from F to D and from R or L to B or, if it stays, from F to B. There is such a part
        only with the choice `level`: of a checkpoint its level, of an activation that is not recomputed `NONE`."""
        offloaded = self._v.offloaded[s, j, p]
        forward, gradient = self._start(Op(F, s, j)), self._end(self._v.backward(s, j))
        self._add(forward, self._start(Op(D, s, j, p)), size, offloaded)
        self._add(self._allocation(Op(moves(p)[2], s, j, p)), gradient, size, offloaded)
        if offloaded is not True:
            stays = ~offloaded
            if others := [choice for other, choice in self._v.level[s, j].items() if other != level]:
                stays = self._v.model.new_bool_var("stays")
                self._v.model.add_exactly_one(offloaded, *others, stays)
            self._add(forward, gradient, size, stays)

    def _add(self, begin: HintedMoment | None, end: HintedMoment | None, size: int, presence: Choice = True) -> None:
        """`size` grains are held between two moments."""
        if size == 0 or begin is None:
            return
        v = self._v
        end = end or self._constant(v.latest)
        duration = v.new_int(0, v.latest, max(0, end.hint - begin.hint), "held for")
        self._intervals.append(v.model.new_optional_interval_var(begin.moment, duration, end.moment, presence, "held"))
        self._sizes.append(size)

    # --- moments

    def _moment(self, s: int, j: int, point: Point, of_forward: bool = False) -> HintedMoment | None:
        """A point of an activation's op; `of_forward` a B is the backward of forward j (`WindowVariables.backward`)."""
        op = self._v.backward(s, j) if of_forward and point.kind == B else Op(point.kind, s, j, point.level)
        return self._end(op) if point.is_end else self._start(op)

    def _start(self, x: Op) -> HintedMoment | None:
        return self._in_window(x, HintedMoment(self._v.start[x], self._v.incumbent.start.get(x, 0)))

    def _end(self, x: Op) -> HintedMoment | None:
        hint = self._v.incumbent.start.get(x, 0) + self._v.duration(x)
        if x.kind == B and (x.stage, x.microbatch) in self._v.incumbent.fused:
            hint += self._v.duration(x._replace(kind=W))
        return self._in_window(x, HintedMoment(self._v.compute_end[x], hint))

    def _in_window(self, x: Op, moment: HintedMoment) -> HintedMoment | None:
        """A moment of x: as it is if x is free, no earlier than the window if x starts before it."""
        if x in self._v.free:
            return moment
        if self._v.side_of_window(self._v.incumbent_start(x)) > 0:
            return None
        return self._constant(max(moment.hint, self._v.window.begin))

    def _allocation(self, x: Op) -> HintedMoment | None:
        if x not in self._v.allocation:
            return None
        if x not in self._v.allocates_in_window:
            return self._constant(self._v.window.begin)
        gradient_start = self._v.incumbent.start[Op(B, x.stage, x.microbatch)]
        return HintedMoment(self._v.allocation[x], self._v.incumbent.allocation.get(x, gradient_start))

    def _constant(self, at: int) -> HintedMoment:
        return HintedMoment(self._v.model.new_constant(at), at)
