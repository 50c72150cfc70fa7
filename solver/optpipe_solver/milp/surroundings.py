"""A window of a schedule, and its surroundings: what is before the window stays as it is, what is after it keeps its
order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from optpipe.evaluate.effects import Effects
from optpipe.model.arrays import Floats, Ints
from optpipe.model.ops import Kind, Op
from optpipe_solver.milp.precedences import Arc
from optpipe_solver.milp.rows import FALSE, TRUE, Literal
from optpipe_solver.milp.schedule_graph import SAME_MS, Activation, ScheduleGraph


class KnownMoment(NamedTuple):
    """A moment outside the window, in ms: the time itself before it, or, after it, how long before the end."""

    after: bool
    ms: float


class Transfers(NamedTuple):
    """The transfers of one activation: when O starts, when R starts, and when R allocates; None is in the window.
    `made`: whether they must be made; otherwise there may be none."""

    made: bool
    O: KnownMoment | None = None
    R: KnownMoment | None = None
    A: KnownMoment | None = None

    @property
    def times(self) -> tuple[KnownMoment | None, KnownMoment | None, KnownMoment | None]:
        return self.O, self.R, self.A


@dataclass(frozen=True)
class OpenWindow:
    """What is decided anew: ops that start in [begin, end) ms on these devices. On the others, such ops keep their
    order but not their time."""

    begin: float
    end: float
    devices: frozenset[int]


class Surroundings:
    """What a model of one window has to know of the schedule around it.

    Attributes
    ----------
    ops
        The compute ops in the window, and the first one after it on each device, before which all of them must end.
    border
        By device the row of that first op.
    first_after
        By device the row of the first op or drop after the window.
    orders
        The precedences of these ops that the window leaves as they are.
    release, rest
        By op: its earliest start as far as that depends on what is before the window, and the least time from its start
        to the end as far as that depends on what is after it. In ms.
    least_ms
        The longest path around the window.
    held
        By device the bytes that the compute ops before the window leave, transfers aside.
    transfers
        Every activation that moves, or may move, in the window, or is away when it begins or ends.
    """

    def __init__(self, incumbent: ScheduleGraph, window: OpenWindow) -> None:
        self.incumbent, self.window = incumbent, window
        inc, problem = incumbent, incumbent.problem
        self.side = self._side_of(inc.start)
        self._allocation_side = self._side_of(inc.allocation)
        self.border: dict[int, int] = {}
        self.first_after: list[int] = []
        rows = []
        for d in range(len(problem.devices)):
            own = np.flatnonzero(inc.compute & (inc.device == d))
            after = own[self.side[own] > 0]
            if len(after):
                self.border[d] = int(after[0])
            stream = np.flatnonzero(~inc.rows.transfer & (inc.device == d) & (self.side > 0))
            self.first_after.append(int(stream.min(initial=len(inc.ops))))
            rows.append(np.r_[own[self.side[own] == 0], after[:1]].tolist())
        self.ops = [inc.ops[row] for own in rows for row in own]
        self.orders: list[Arc] = []
        for d, own in enumerate(rows):
            if d not in window.devices:
                self.orders += [(inc.ops[a], inc.ops[b], 0.0) for a, b in pairwise(own)]
            elif d in self.border:
                self.orders += [(inc.ops[row], inc.ops[own[-1]], 0.0) for row in own[:-1]]
        self._set_paths({row for own in rows for row in own})
        effects = Effects(problem)
        before = inc.compute & (self.side < 0)
        left = (effects.takes - effects.frees)[inc.rows.kind, inc.rows.stage]
        self.held = [int(left[before & (inc.device == d)].sum()) for d in range(len(problem.devices))]
        self.transfers = dict(self._transfers())

    @property
    def is_everything(self) -> bool:
        """Whether nothing surrounds the window."""
        return len(self.window.devices) == len(self.held) and not self.side.any()

    def _side_of(self, times: Floats) -> Ints:
        """-1 before the window, 0 in it, 1 after it."""
        late: Ints = (times >= self.window.end - SAME_MS).astype(np.int64)
        return late - (times < self.window.begin - SAME_MS)

    def _set_paths(self, inside: set[int]) -> None:
        """Sets `release`, `rest` and `least_ms`."""
        inc = self.incumbent
        release = np.array([self.last_end_before(d).ms for d in range(len(inc.problem.devices))])[inc.device]
        rest = inc.end - inc.start + inc.delivery
        rest[list(self.border.values())] = inc.tail[list(self.border.values())]
        self.least_ms = float((inc.end + inc.delivery)[self.side < 0].max(initial=0.0))
        for a, b, delay, by_order in zip(*map(np.ndarray.tolist, inc.edges), strict=True):
            if self.side[a] < 0 and b in inside:
                release[b] = max(release[b], inc.end[a] + delay)
            elif self.side[a] < 0 and self.side[b] > 0:
                self.least_ms = max(self.least_ms, float(inc.end[a] + delay + inc.tail[b]))
            elif a in inside and self.side[b] > 0 and b not in inside and not by_order:
                rest[a] = max(rest[a], inc.end[a] - inc.start[a] + delay + inc.tail[b])
        self.release = {inc.ops[row]: float(release[row]) for row in inside}
        self.rest = {inc.ops[row]: float(rest[row]) for row in inside}

    def _transfers(self) -> Iterator[tuple[Activation, Transfers]]:
        inc = self.incumbent
        for op in inc.ops:
            a = op.stage, op.microbatch
            device, row = inc.problem.stages[op.stage].device, inc.row
            if op.kind != Kind.F or not inc.problem.stages[op.stage].can_offload:
                continue
            offload, reload = inc.parts(Kind.O, a), inc.parts(Kind.R, a)
            if offload:
                if self.side[offload[0]] <= 0 <= self.side[reload[0]]:
                    O, R = (
                        None if self.side[i] == 0 else self.known_start(inc.ops[i]) for i in (offload[0], reload[0])
                    )
                    A = None
                    if reload[0] > self.first_after[device]:
                        A = KnownMoment(True, float(inc.tail[reload[0]]))
                    elif self._allocation_side[reload[0]] < 0:
                        A = KnownMoment(False, float(inc.allocation[reload[0]]))
                    made = device not in self.window.devices or not O is R is A is None
                    yield a, Transfers(made, O, R, A)
            elif device in self.window.devices and self.side[row[op]] <= 0 <= self.side[row[Op(Kind.B, *a)]]:
                yield a, Transfers(False)

    def is_border(self, op: Op) -> bool:
        """Whether op is the first after the window on its device: what is in memory then is as it was."""
        return self.incumbent.row[op] in self.border.values()

    def known_start(self, op: Op) -> KnownMoment:
        """When an op starts that is not in the window."""
        row = self.incumbent.row[op]
        if self.side[row] > 0:
            return KnownMoment(True, float(self.incumbent.tail[row]))
        return KnownMoment(False, float(self.incumbent.start[row]))

    def away_literals(self, a: Activation, y: Op, W: Literal) -> tuple[Literal | None, Literal | None]:
        """M and N of an activation and an op of its device: whether the drop, whether the reload comes before y. None
        where they are open."""
        inc, device = self.incumbent, self.incumbent.problem.stages[a[0]].device
        at, made = inc.row[y], self.transfers[a].made
        if device not in self.window.devices or at == self.border.get(device):
            if not made:
                return W, W
            return (TRUE if inc.parts(Kind.D, a)[-1] < at else FALSE), (TRUE if inc.parts(Kind.R, a)[0] < at else FALSE)
        A = self.transfers[a].A
        N = None if A is None else FALSE if A.after else TRUE
        gone = made and (N == TRUE or self.side[inc.parts(Kind.D, a)[-1]] < 0)
        return TRUE if gone else None, N

    def late_drop(self, a: Activation) -> KnownMoment | None:
        """The drop, if it is behind the window."""
        for row in self.incumbent.parts(Kind.D, a)[-1:]:
            device = self.incumbent.device[row]
            if self.transfers[a].made and row >= self.first_after[int(device)]:
                return KnownMoment(True, float(self.incumbent.tail[row]))
        return None

    def last_end_before(self, device: int) -> KnownMoment:
        """When the last compute op before the window ends on a device."""
        inc = self.incumbent
        return KnownMoment(
            False, float(inc.end[inc.compute & (inc.device == device) & (self.side < 0)].max(initial=0.0))
        )

    def link(self, device: int, kind: Kind) -> tuple[KnownMoment, KnownMoment]:
        """When the last transfer before the window ends on a device's link, and how long before the end the first one
        after it starts."""
        inc, problem = self.incumbent, self.incumbent.problem
        same = problem.costs.link[inc.device] == problem.costs.link[device]
        rivals = same & inc.rows.transfer & ((problem.transfer_mode == "half_duplex") | (inc.rows.kind == kind))
        free = inc.end[rivals & (self.side < 0)].max(initial=0.0)
        return KnownMoment(False, float(free)), KnownMoment(
            True, float(inc.tail[rivals & (self.side > 0)].max(initial=0.0))
        )

    def starts(self, end_ms: float, modelled: set[Activation]) -> dict[Op, float]:
        """The start in ms of every op outside the window, in a schedule of this length; without the transfers of the
        activations in `modelled`."""
        inc, inside = self.incumbent, {op for op in self.ops if not self.is_border(op)}
        found = {}
        for i, op in enumerate(inc.ops):
            own = op.kind in (Kind.O, Kind.R) and (op.stage, op.microbatch) in modelled
            if op.kind != Kind.D and op not in inside and not own:
                found[op] = float(inc.start[i] if self.side[i] < 0 else end_ms - inc.tail[i])
        return found
