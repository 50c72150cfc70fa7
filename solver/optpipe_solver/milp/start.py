"""A schedule as a start for the search: the value of each binary in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from optpipe.model.ops import Kind, Op
from optpipe.model.program import KIND, MICROBATCH, PART, STAGE
from optpipe.schedule import Schedule
from optpipe_solver.milp.precedences import compute_ops, equal_microbatches
from optpipe_solver.milp.rows import Literal
from optpipe_solver.milp.variables import Activation, Variables


class Interval(NamedTuple):
    """When an op runs, in ms."""

    start: float
    end: float


NO_SCHEDULE_MS = Interval(math.inf, math.inf)


def assignment(v: Variables, schedule: Schedule) -> dict[int, float]:
    """The values of the binaries, by variable, in a schedule. They contradict each other if the model cannot express
    the schedule; the solver then drops them."""
    reading = _Reading(v, schedule)
    return {literal.var: float(literal.positive == truth) for literal, truth in reading.truths() if literal.var >= 0}


class _Reading:
    """A schedule as the model's variables see it.

    Attributes
    ----------
    compute
        When each F, B and W runs.
    offload, reload
        By activation when the whole of it moves; None where the solver decides.
    """

    def __init__(self, v: Variables, schedule: Schedule) -> None:
        self._v, timeline = v, schedule.timeline
        rows = zip(timeline.table.tolist(), timeline.start.tolist(), timeline.end.tolist(), strict=True)
        self._interval = {
            Op(Kind(row[KIND]), row[STAGE], row[MICROBATCH], row[PART]): Interval(start, end)
            for row, start, end in rows
        }
        self.compute = self._compute_intervals()
        self.offload = {a: self._transfer_interval(Kind.O, a) for a in v.activations}
        self.reload = {a: self._transfer_interval(Kind.R, a) for a in v.activations}
        self._offloaded = {a for a in v.activations if self.offload[a]}
        self._place_transfers_that_are_not_made()

    def truths(self) -> Iterator[tuple[Literal, bool]]:
        """Each literal, and whether it holds."""
        v, ops = self._v, self._v.paths.ops
        for (x, y), P in v.P.items():
            yield P, self.compute[ops[x]] < self.compute[ops[y]]
        for a, W in v.W.items():
            yield W, a in self._offloaded
        yield from self._link_order_truths()
        for (a, y), M in v.M.items():
            yield M, self._if_made(self.offload, a).end <= self.compute[ops[y]].start
        for (a, y), N in v.N.items():
            yield N, self._if_made(self.reload, a).start < self.compute[ops[y]].end
        for (c, b), X in v.X.items():
            begin = self._if_made(self.reload, b).start
            dropped = self._if_made(self.offload, c).end <= self._allocation_moment(b)
            still_away = begin < self._if_made(self.reload, c).start < math.inf
            yield X, b in self._offloaded and dropped and still_away

    def _link_order_truths(self) -> Iterator[tuple[Literal, bool]]:
        """K, L and H of transfers whose place is known."""
        v = self._v
        for orders, moved in ((v.K, self.offload), (v.L, self.reload)):
            for (a, b), literal in orders.items():
                first, second = moved[a], moved[b]
                if a < b and first is not None and second is not None:
                    yield literal, first <= second
                    yield orders[b, a], first > second
        for (a, b), H in v.H.items():
            first, second = self.offload[a], self.reload[b]
            if first is not None and second is not None:
                yield H, first <= second

    def _if_made(self, moved: dict[Activation, Interval | None], a: Activation) -> Interval:
        return (moved[a] or NO_SCHEDULE_MS) if a in self._offloaded else NO_SCHEDULE_MS

    def _allocation_moment(self, b: Activation) -> float:
        """When the reload of b allocates: where its copy starts or, if that is during a compute op, before this op."""
        begin = self._if_made(self.reload, b).start
        intervals = (self.compute[self._v.paths.ops[y]] for (a, y) in self._v.N if a == b)
        return min((op.start for op in intervals if op.start < begin < op.end), default=begin)

    def _transfer_interval(self, kind: Kind, a: Activation) -> Interval | None:
        """From the first part's start to the last one's end; None unless all parts move, as the model moves whole
        activations."""
        parts = [Op(kind, *a, part) for part in range(self._v.problem.stages[a[0]].offload_parts)]
        if not all(part in self._interval for part in parts):
            return None
        intervals = [self._interval[part] for part in parts]
        return Interval(min(part.start for part in intervals), max(part.end for part in intervals))

    def _place_transfers_that_are_not_made(self) -> None:
        """One that is not made takes no time and lies between two transfers, as early as those before it allow."""
        v, link = self._v, self._v.costs.link[self._v.costs.device]
        half_duplex = v.problem.transfer_mode == "half_duplex"
        for a in sorted(v.activations):
            if a in self._offloaded or v.keeps_place(a):
                continue
            moment = self.compute[Op(Kind.F, *a)].end
            for moved, other_way in ((self.offload, self.reload), (self.reload, self.offload)):
                before = (moved[b] for b in v.activations if v.keep_order(b, a))
                moment = max([moment, *(interval.end for interval in before if interval)])
                on_stream = [*moved.items(), *(other_way.items() if half_duplex else ())]
                for start, end in sorted(x for b, x in on_stream if x and link[b[0]] == link[a[0]]):
                    if start < moment < end:
                        moment = end
                moved[a] = Interval(moment, moment)

    def _compute_intervals(self) -> dict[Op, Interval]:
        """Start and end of every F, B and W. A BW is a B followed by its W; Ws are numbered as their Bs, with a fixed
        order everything is."""
        v, intervals = self._v, dict[Op, Interval]()
        for op in compute_ops(v.problem):
            fused = self._interval.get(Op(Kind.BW, op.stage, op.microbatch))
            if fused is None or op.kind == Kind.F:
                intervals[op] = self._interval[op]
            else:
                middle = fused.start + float(v.costs.ms[Kind.B, op.stage, op.microbatch])
                intervals[op] = Interval(fused.start, middle) if op.kind == Kind.B else Interval(middle, fused.end)
        for route, batches in equal_microbatches(v.problem):
            for s in route:
                F, B, W = ([Op(kind, s, j) for j in batches] for kind in (Kind.F, Kind.B, Kind.W))
                if v.order != "stages":
                    W = [w for _, w in sorted(zip((intervals[b] for b in B), W, strict=True))]
                for ops in (F, B, W) if v.order == "stages" else (W,):
                    intervals |= dict(zip(ops, sorted(intervals[op] for op in ops), strict=True))
        return intervals
