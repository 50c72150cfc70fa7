"""A schedule as the model's variables see it, and windows of it: some ops are free, the others keep their order."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import NamedTuple, final

from optpipe.model.ops import Kind, Op
from optpipe.model.program import KIND, MICROBATCH, PART, STAGE
from optpipe.schedule import Schedule
from optpipe_solver.milp.paths import (
    COMPUTE,
    WHOLE,
    Activation,
    Arc,
    MicrobatchOrder,
    compute_ops,
    equal_microbatches,
)


class Interval(NamedTuple):
    """When an op runs, in ms."""

    start: float
    end: float


NOT_MADE = Interval(math.inf, math.inf)


@final
class Reading:
    """When each compute op runs, and when activations, and parts of them, move.

    A BW is a B followed by its W. With `order` "stages" equal micro-batches are numbered anew in every stage, else Ws
    as their Bs. Transfers of equal activations of a stage are exchanged where these keep their order in F and in B.
    """

    def __init__(self, schedule: Schedule, order: MicrobatchOrder) -> None:
        self.problem, timeline = schedule.problem, schedule.timeline
        rows = zip(timeline.table.tolist(), timeline.start.tolist(), timeline.end.tolist(), strict=True)
        self._interval = {
            Op(Kind(row[KIND]), row[STAGE], row[MICROBATCH], row[PART]): Interval(start, end)
            for row, start, end in rows
        }
        self.level = {(op.stage, op.microbatch): op.part for op in self._interval if op.kind == Kind.C}
        self.compute = self._compute_intervals(order)
        self.moved = {kind: self._transfer_intervals(kind) for kind in (Kind.O, Kind.R)}
        self.offload, self.reload = self.moved[Kind.O], self.moved[Kind.R]
        self._exchange_transfers()

    def drops_before(self, a: Activation, y: Op) -> bool:
        return self.offload.get(a, NOT_MADE).end <= self.compute[y].start

    def returns_before(self, a: Activation, y: Op) -> bool:
        return self.reload.get(a, NOT_MADE).start < self.compute[y].end

    def is_away_at_reload(self, c: Activation, b: Activation) -> bool:
        """Of two activations of a device, whether c is away when the reload of b allocates."""
        moment = self._allocations.get(b, math.inf)
        return self.offload.get(c, NOT_MADE).end <= moment and self.reload.get(b, NOT_MADE) < self.reload.get(
            c, NOT_MADE
        )

    @cached_property
    def _allocations(self) -> dict[Activation, float]:
        """A reload allocates where its copy starts or, if that is during a compute op, before this op."""
        device = {s: stage.device for s, stage in enumerate(self.problem.stages)}
        starts: dict[int, list[Interval]] = {}
        for op, interval in self.compute.items():
            starts.setdefault(device[op.stage], []).append(interval)
        for each in starts.values():
            each.sort()
        moments = dict[Activation, float]()
        for a, (start, _) in self.reload.items():
            each = starts[device[a[0]]]
            before = each[bisect_right(each, (start, math.inf)) - 1]
            moments[a] = before.start if start < before.end else start
        return moments

    def _transfer_intervals(self, kind: Kind) -> dict[Activation, Interval]:
        """Of each part and, where all move, of the whole, from its first part's start to the last one's end."""
        parts: dict[Activation, list[Interval]] = {}
        for (of, s, j, part), interval in self._interval.items():
            if of == kind:
                for a in ((s, j, part), (s, j, WHOLE)):
                    parts.setdefault(a, []).append(interval)
        return {
            a: Interval(min(each.start for each in moved), max(each.end for each in moved))
            for a, moved in parts.items()
            if a[2] != WHOLE or len(moved) == self.problem.stages[a[0]].offload_parts
        }

    def _compute_intervals(self, order: MicrobatchOrder) -> dict[Op, Interval]:
        intervals = dict[Op, Interval]()
        for op in compute_ops(self.problem):
            fused = self._interval.get(Op(Kind.BW, op.stage, op.microbatch))
            if fused is None or op.kind == Kind.F:
                intervals[op] = self._interval[op]
            else:
                middle = fused.start + float(self.problem.costs.ms[Kind.B, op.stage, op.microbatch])
                intervals[op] = Interval(fused.start, middle) if op.kind == Kind.B else Interval(middle, fused.end)
        intervals |= {op: interval for op, interval in self._interval.items() if op.kind == Kind.C}
        for route, batches in equal_microbatches(self.problem):
            for s in route:
                F, B, W = ([Op(kind, s, j) for j in batches] for kind in COMPUTE)
                if order != "stages":
                    W = [w for _, w in sorted(zip((intervals[b] for b in B), W, strict=True))]
                for ops in (F, B, W) if order == "stages" else (W,):
                    intervals |= dict(zip(ops, sorted(intervals[op] for op in ops), strict=True))
        return intervals

    def _exchange_transfers(self) -> None:
        for route, batches in equal_microbatches(self.problem):
            most = max(self.problem.stages[s].offload_parts for s in route)
            for s, part in product(route, range(WHOLE, most)):
                each = [(s, j, part) for j in batches if (s, j, part) in self.offload and (s, j) not in self.level]
                each.sort(key=lambda a: self.compute[Op(Kind.F, *a[:2])])
                if each == sorted(each, key=lambda a: self.compute[Op(Kind.B, *a[:2])]):
                    for intervals in self.moved.values():
                        intervals |= dict(zip(each, sorted(intervals[a] for a in each), strict=True))


@dataclass(frozen=True)
class Window:
    """What of a schedule is free: some compute ops, and whether and when activations leave whose F or B is among them.
    All other ops keep their order; so do equal micro-batches in each kind of op of a stage. What is recomputed
    stays so, and leaves only if it does so in the schedule."""

    reading: Reading
    free: frozenset[Op]

    def touches(self, *activations: Activation) -> bool:
        """Whether one of the activations may leave or stay, and move at another time."""
        return any(Op(kind, *a[:2]) in self.free for a in activations for kind in (Kind.F, Kind.B))

    @property
    def arcs(self) -> Iterator[Arc]:
        """What stays as it is in the order of compute ops."""
        problem, start = self.reading.problem, self.reading.compute.__getitem__
        for (s, j), level in self.reading.level.items():
            yield Op(Kind.F, s, j), Op(Kind.C, s, j, level), 0.0
            yield Op(Kind.C, s, j, level), Op(Kind.B, s, j), 0.0
        programs: list[list[Op]] = [[] for _ in problem.devices]
        for op in sorted(self.reading.compute, key=start):
            programs[problem.stages[op.stage].device].append(op)
        for program in programs:
            last, since = None, list[Op]()  # the last op that is fixed, and those that are free since
            for op in program:
                if op in self.free:
                    since.append(op)
                    if last:
                        yield last, op, 0.0
                else:
                    yield from ((x, op, 0.0) for x in since or filter(None, [last]))
                    last, since = op, []
        for route, batches in equal_microbatches(problem):
            for s in route:
                for kind in COMPUTE:
                    ops = sorted((Op(kind, s, j) for j in batches), key=start)
                    yield from ((x, y, 0.0) for x, y in pairwise(ops))
