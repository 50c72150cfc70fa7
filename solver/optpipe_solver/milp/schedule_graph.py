"""A schedule that windows are taken from: its times, and who waits for whom."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from optpipe.evaluate.graph import ISSUED
from optpipe.evaluate.objective import Objective, length_ms
from optpipe.model.arrays import Flags, Floats, Ints
from optpipe.model.ops import Kind, Op
from optpipe.schedule import Schedule, check
from optpipe_solver.milp.precedences import COMPUTE, microbatches_by_route
from optpipe_solver.paths import allocation_times, deliveries, split_backwards, tails

Activation = tuple[int, int]  # stage and micro-batch
SAME_MS = 1e-6  # moments closer than that are one


class ScheduleGraph:
    """A schedule of F, B, W and whole transfers, timed as early as can be, by rows of its timeline.

    `delivery` (n,) is how long each row counts after its end, and `end_ms` when all is delivered (`paths.deliveries`):
    nothing, and the makespan, unless the objective is the span. `length_ms` is what the objective says.
    """

    def __init__(self, schedule: Schedule, objective: Objective = "makespan") -> None:
        self.objective = objective
        self.schedule, self.problem, timeline = schedule, schedule.problem, schedule.timeline
        self.rows, self.device, self.start, self.end = timeline.rows, timeline.device, timeline.start, timeline.end
        self.ops = [self.rows.op(row) for row in range(len(self.rows))]
        self.row = {op: i for i, op in enumerate(self.ops)}
        self.compute: Flags = self.rows.of_kinds(*COMPUTE)
        self._by_device = deliveries(schedule, objective)
        self.delivery: Floats = self._by_device[self.device] * self.compute
        self.end_ms = float((self.end + self.delivery).max())
        self.length_ms = length_ms(schedule, objective)

    @cached_property
    def edges(self) -> tuple[Ints, Ints, Floats, Flags]:
        """Who waits for whom: rows (first, second), the delay after the first's end, and whether the second waits only
        because of the order of a program or a stream."""
        waits, delays = self.schedule.compiled.waits
        second, column = np.nonzero(waits >= 0)
        by_order = np.isin(column, (ISSUED, waits.shape[1] - 1))
        return waits[second, column], second, delays[second, column], by_order

    @cached_property
    def tail(self) -> Floats:
        """(n,) the longest path from each op's start to the end, in ms."""
        return np.array(tails(self.schedule, self._by_device))

    @cached_property
    def allocation(self) -> Floats:
        """(n,) when each op takes its place in its program, in ms."""
        return allocation_times(self.schedule.timeline)

    def parts(self, kind: Kind, a: Activation) -> list[int]:
        """The rows of an activation's O, D or R, part by part; none where it stays."""
        n = self.problem.stages[a[0]].offload_parts
        return [self.row[op] for part in range(n) if (op := Op(kind, *a, part)) in self.row]

    @cached_property
    def in_order(self) -> bool:
        """Whether every stage runs its micro-batches, and moves their activations, in the order of their numbers."""
        for route, batches in microbatches_by_route(self.problem).items():
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
        if self.rows.of_kinds(Kind.C, Kind.BW).any() or len(self.rows.first):
            return False
        for op in self.ops:
            if op.kind in (Kind.O, Kind.R) and op.part == 0:
                rows = self.parts(op.kind, (op.stage, op.microbatch))
                gaps = np.abs(self.start[rows[1:]] - self.end[rows[:-1]])
                if len(rows) < self.problem.stages[op.stage].offload_parts or (gaps > SAME_MS).any():
                    return False
        return all(op._replace(part=0) in self.row for op in self.ops)


def split_if_it_fits(schedule: Schedule) -> Schedule:
    """The same schedule with B and W for every BW; unchanged where that needs too much memory."""
    found = split_backwards(schedule)
    return schedule if check(schedule.problem, found) else found
