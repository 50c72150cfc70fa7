"""A window of an incumbent, and what surrounds it: what is before the window stays as it is, what is after it keeps its
order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from optpipe.evaluate.graph import ACROSS, ISSUED, dependencies, is_transfer, streams
from optpipe.model.arrays import Flags, Floats, Ints
from optpipe.model.ops import Kind, Op
from optpipe.model.program import JOINED, KIND, STAGE
from optpipe.schedule import Schedule, check
from optpipe_solver.milp.rows import FALSE, TRUE, Literal
from optpipe_solver.milp.windows import Arc, passing
from optpipe_solver.paths import apart, stands, tails

Activation = tuple[int, int]  # stage and micro-batch
COMPUTE = (Kind.F, Kind.B, Kind.W)
SAME_MS = 1e-6


class Known(NamedTuple):
    """A moment outside the window, in ms: the time itself before it, or, after it, how long before the end."""

    after: bool
    ms: float


class Moves(NamedTuple):
    """The transfers of one activation: when O starts, R starts, and R stands in its program; None is in the window.
    `made` where they must be; otherwise there may be none."""

    made: bool
    O: Known | None = None
    R: Known | None = None
    A: Known | None = None

    @property
    def times(self) -> tuple[Known | None, Known | None, Known | None]:
        return self.O, self.R, self.A


class Incumbent:
    """A schedule of F, B, W and whole transfers, timed as early as can be; `tail`: the longest path from an op's start
    to the end."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.problem = schedule, schedule.problem
        timeline = schedule.timeline
        self.table, self.device, self.start, self.end = timeline.table, timeline.device, timeline.start, timeline.end
        self.end_ms = float(self.end.max())
        self.ops = [Op(Kind(kind), s, j, part) for kind, s, j, part, _ in self.table.tolist()]
        self.row = {op: i for i, op in enumerate(self.ops)}
        self.compute: Flags = np.isin(self.table[:, KIND], COMPUTE)

    @cached_property
    def edges(self) -> tuple[Ints, Ints, Floats, Ints]:
        """Who waits for whom: rows (first, second), the delay after the first's end, and the column of
        `optpipe.evaluate.graph.dependencies`, or -1 for the order on a stream."""
        needs, delay = dependencies(self.problem, self.table, self.device)
        order, begins = streams(self.problem, self.schedule, self.table, self.device)
        second, column = np.nonzero(needs >= 0)
        apart = np.isin(np.arange(1, len(order)), begins, invert=True)
        first = np.r_[needs[second, column], order[:-1][apart]]
        column = np.r_[column, np.full(np.count_nonzero(apart), -1)]
        second = np.r_[second, order[1:][apart]]
        return first, second, np.where(column == ACROSS, delay[second], 0.0), column

    @cached_property
    def tail(self) -> Floats:
        return np.array(tails(self.schedule))

    def parts(self, kind: Kind, a: Activation) -> list[int]:
        """The rows of an activation's O, D or R, part by part; none where it stays."""
        n = self.problem.stages[a[0]].offload_parts
        return [self.row[op] for part in range(n) if (op := Op(kind, *a, part)) in self.row]

    @cached_property
    def stands(self) -> Floats:
        return stands(self.schedule.timeline)

    @cached_property
    def in_order(self) -> bool:
        """Whether every stage runs its micro-batches, and moves their activations, in the order of their numbers."""
        for route, batches in passing(self.problem).items():
            for kind in (*COMPUTE, Kind.O, Kind.R):
                for s in route:
                    rows = [self.row[op] for j in batches if (op := Op(kind, s, j)) in self.row]
                    if (np.diff(self.start[rows]) < 0).any():
                        return False
        return True

    @property
    def expressible(self) -> bool:
        """Whether the model knows all that the schedule does: no recompute, no pairs, BW only as B and W, and whole
        activations that move in one go."""
        kinds = np.isin(self.table[:, KIND], (Kind.C, Kind.BW))
        if kinds.any() or (self.table[:, JOINED] == 1).any():
            return False
        for op in self.ops:
            if op.kind in (Kind.O, Kind.R) and op.part == 0:
                rows = self.parts(op.kind, (op.stage, op.microbatch))
                if (
                    len(rows) < self.problem.stages[op.stage].offload_parts
                    or (np.abs(self.start[rows[1:]] - self.end[rows[:-1]]) > SAME_MS).any()
                ):
                    return False
        return all(op._replace(part=0) in self.row for op in self.ops)


def split(schedule: Schedule) -> Schedule:
    """The same with B and W, one after the other, for every BW, as far as that fits into memory."""
    found = apart(schedule)
    return schedule if check(schedule.problem, found) else found


@dataclass(frozen=True)
class Window:
    """Open is what starts in [begin, end) ms on these devices; on the others, what starts then keeps its order but not
    its time."""

    begin: float
    end: float
    devices: frozenset[int]


class Frame:
    """What a model of one window has to know of the schedule around it. `ops`: those in the window and the first one
    after it on each device, whose start everything in the window must leave alone."""

    def __init__(self, incumbent: Incumbent, window: Window) -> None:
        self.incumbent, self.window = incumbent, window
        inc, problem = incumbent, incumbent.problem
        self.side = self._side_of(inc.start)
        self._stands_side = self._side_of(inc.stands)
        self.border: dict[int, int] = {}  # device: row
        self.first_after: list[int] = []  # row of an op or a drop
        rows = []
        for d in range(len(problem.devices)):
            own = np.flatnonzero(inc.compute & (inc.device == d))
            after = own[self.side[own] > 0]
            if len(after):
                self.border[d] = int(after[0])
            stream = np.flatnonzero(~is_transfer(inc.table) & (inc.device == d) & (self.side > 0))
            self.first_after.append(int(stream.min(initial=len(inc.ops))))
            rows.append(np.r_[own[self.side[own] == 0], after[:1]].tolist())
        self.ops = [inc.ops[row] for own in rows for row in own]
        self.orders: list[Arc] = []
        for d, own in enumerate(rows):
            if d not in window.devices:
                self.orders += [(inc.ops[a], inc.ops[b], 0.0) for a, b in pairwise(own)]
            elif d in self.border:
                self.orders += [(inc.ops[row], inc.ops[own[-1]], 0.0) for row in own[:-1]]
        self._surroundings({row for own in rows for row in own})
        self.held = [self._held(d) for d in range(len(problem.devices))]
        self.moves = dict(self._moves())

    @property
    def is_everything(self) -> bool:
        """Whether nothing surrounds the window."""
        return len(self.window.devices) == len(self.held) and not self.side.any()

    def _side_of(self, times: Floats) -> Ints:
        """-1 before the window, 0 in it, 1 after it."""
        late: Ints = (times >= self.window.end - SAME_MS).astype(np.int64)
        return late - (times < self.window.begin - SAME_MS)

    def _surroundings(self, inside: set[int]) -> None:
        """When what is before the window lets each op start, and how long what is after it takes. `least_ms`: the
        longest path around."""
        inc = self.incumbent
        release = np.array([self.done(d).ms for d in range(len(inc.problem.devices))])[inc.device]
        rest = inc.end - inc.start
        rest[list(self.border.values())] = inc.tail[list(self.border.values())]
        self.least_ms = float(inc.end[self.side < 0].max(initial=0.0))
        for a, b, delay, column in zip(*map(np.ndarray.tolist, inc.edges), strict=True):
            if self.side[a] < 0 and b in inside:
                release[b] = max(release[b], inc.end[a] + delay)
            elif self.side[a] < 0 and self.side[b] > 0:
                self.least_ms = max(self.least_ms, float(inc.end[a] + delay + inc.tail[b]))
            elif a in inside and self.side[b] > 0 and b not in inside and column not in (-1, ISSUED):
                rest[a] = max(rest[a], inc.end[a] - inc.start[a] + delay + inc.tail[b])
        self.release = {inc.ops[row]: float(release[row]) for row in inside}
        self.rest = {inc.ops[row]: float(rest[row]) for row in inside}

    def _held(self, device: int) -> int:
        """Bytes that the compute ops before the window leave, transfers aside."""
        inc, costs = self.incumbent, self.incumbent.problem.costs
        own = inc.table[inc.compute & (inc.device == device) & (self.side < 0)]
        kind, stage = own[:, KIND], own[:, STAGE]
        left = np.where(kind == Kind.F, costs.activation[stage], 0) - np.where(
            kind == Kind.B, costs.activation[stage], 0
        )
        left += np.where(kind == Kind.B, costs.saved_for_weight[stage], 0) - np.where(
            kind == Kind.W, costs.saved_for_weight[stage], 0
        )
        return int(left.sum())

    def _moves(self) -> Iterator[tuple[Activation, Moves]]:
        """Every activation that moves, or may move, in the window, or is away when it begins or ends."""
        inc = self.incumbent
        for op in inc.ops:
            a = op.stage, op.microbatch
            device, row = inc.problem.stages[op.stage].device, inc.row
            if op.kind != Kind.F or not inc.problem.stages[op.stage].can_offload:
                continue
            offload, reload = inc.parts(Kind.O, a), inc.parts(Kind.R, a)
            if offload:
                if self.side[offload[0]] <= 0 <= self.side[reload[0]]:
                    O, R = (None if self.side[i] == 0 else self.outside(inc.ops[i]) for i in (offload[0], reload[0]))
                    A = None
                    if reload[0] > self.first_after[device]:
                        A = Known(True, float(inc.tail[reload[0]]))
                    elif self._stands_side[reload[0]] < 0:
                        A = Known(False, float(inc.stands[reload[0]]))
                    made = device not in self.window.devices or not O is R is A is None
                    yield a, Moves(made, O, R, A)
            elif device in self.window.devices and self.side[row[op]] <= 0 <= self.side[row[Op(Kind.B, *a)]]:
                yield a, Moves(False)

    def is_border(self, op: Op) -> bool:
        """Whether it is the first op after the window on its device: what is in memory then is as it was."""
        return self.incumbent.row[op] in self.border.values()

    def outside(self, op: Op) -> Known:
        """When an op starts that is not in the window."""
        row = self.incumbent.row[op]
        if self.side[row] > 0:
            return Known(True, float(self.incumbent.tail[row]))
        return Known(False, float(self.incumbent.start[row]))

    def away(self, a: Activation, y: Op, W: Literal) -> tuple[Literal | None, Literal | None]:
        """M and N of an activation and an op of its device, None where they are open: does the drop, does the reload
        stand before y?"""
        inc, device = self.incumbent, self.incumbent.problem.stages[a[0]].device
        at, made = inc.row[y], self.moves[a].made
        if device not in self.window.devices or at == self.border.get(device):
            if not made:
                return W, W
            return (TRUE if inc.parts(Kind.D, a)[-1] < at else FALSE), (TRUE if inc.parts(Kind.R, a)[0] < at else FALSE)
        A = self.moves[a].A
        N = None if A is None else FALSE if A.after else TRUE
        gone = made and (N == TRUE or self.side[inc.parts(Kind.D, a)[-1]] < 0)
        return TRUE if gone else None, N

    def late_drop(self, a: Activation) -> Known | None:
        """The drop, where it stands behind the window."""
        for row in self.incumbent.parts(Kind.D, a)[-1:]:
            device = self.incumbent.device[row]
            if self.moves[a].made and row >= self.first_after[int(device)]:
                return Known(True, float(self.incumbent.tail[row]))
        return None

    def done(self, device: int) -> Known:
        """When the last compute op before the window ends on a device."""
        inc = self.incumbent
        return Known(False, float(inc.end[inc.compute & (inc.device == device) & (self.side < 0)].max(initial=0.0)))

    def link(self, device: int, kind: Kind) -> tuple[Known, Known]:
        """For transfers in the window: when the last one before it ends, and how long before the end the first one
        after it starts."""
        inc, problem = self.incumbent, self.incumbent.problem
        same = problem.costs.link[inc.device] == problem.costs.link[device]
        rivals = (
            same & is_transfer(inc.table) & ((problem.transfer_mode == "half_duplex") | (inc.table[:, KIND] == kind))
        )
        free = inc.end[rivals & (self.side < 0)].max(initial=0.0)
        return Known(False, float(free)), Known(True, float(inc.tail[rivals & (self.side > 0)].max(initial=0.0)))

    def starts(self, end_ms: float, modelled: set[Activation]) -> dict[Op, float]:
        """The start of every op outside the window in a schedule of that length; transfers of the activations given are
        the model's."""
        inc, inside = self.incumbent, {op for op in self.ops if not self.is_border(op)}
        found = {}
        for i, op in enumerate(inc.ops):
            own = op.kind in (Kind.O, Kind.R) and (op.stage, op.microbatch) in modelled
            if op.kind != Kind.D and op not in inside and not own:
                found[op] = float(inc.start[i] if self.side[i] < 0 else end_ms - inc.tail[i])
        return found
