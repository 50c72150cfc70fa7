"""A schedule that windows are taken from: its times, and who waits for whom."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from optpipe.evaluate.graph import ACROSS, dependencies, streams
from optpipe.model.arrays import Flags, Floats, Ints
from optpipe.model.ops import Kind, Op
from optpipe.model.program import JOINED, KIND
from optpipe.schedule import Schedule, check
from optpipe_solver.milp.precedences import COMPUTE, microbatches_by_route
from optpipe_solver.paths import allocation_times, split_backwards, tails

Activation = tuple[int, int]  # stage and micro-batch
SAME_MS = 1e-6  # moments closer than that are one


class ScheduleGraph:
    """A schedule of F, B, W and whole transfers, timed as early as can be, by rows of its timeline."""

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
        in_stream = np.isin(np.arange(1, len(order)), begins, invert=True)
        first = np.r_[needs[second, column], order[:-1][in_stream]]
        column = np.r_[column, np.full(np.count_nonzero(in_stream), -1)]
        second = np.r_[second, order[1:][in_stream]]
        return first, second, np.where(column == ACROSS, delay[second], 0.0), column

    @cached_property
    def tail(self) -> Floats:
        """(n,) the longest path from each op's start to the end, in ms."""
        return np.array(tails(self.schedule))

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
        if np.isin(self.table[:, KIND], (Kind.C, Kind.BW)).any() or (self.table[:, JOINED] == 1).any():
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
