"""A schedule on the grid: when each op starts at the earliest, and how much must still follow it; and the schedule from
which an engine begins whose models work on a grid."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from optpipe.evaluate.objective import Objective
from optpipe.model.ops import COMPUTE, Kind, Op
from optpipe.model.program import PART
from optpipe.schedule import Schedule
from optpipe_solver.cpsat.grid import Grid
from optpipe_solver.heuristics import generate
from optpipe_solver.incumbents import Incumbents
from optpipe_solver.methods import HEURISTICS
from optpipe_solver.schedule_facts import (
    allocation_times,
    deliveries,
    has_only_known_ops,
    needs_fused,
    split_backwards,
    tails,
)


@dataclass(frozen=True)
class GridSchedule:
    """A schedule on the grid: ticks by op, in the order of the programs. A BW is its B and, right after it, its W.

    Attributes
    ----------
    start
        Of F, B, W, C, O, D and R; parts are numbered as in the grid (`Grid.level_of_part`).
    allocation
        When O and R allocate their bytes: at their start or, inside a compute op, before that op.
    tail
        From an op's start to the schedule's end, if all that must follow it follows at once.
    fused
        Stage and micro-batch of each BW.
    delivery
        By device how long its compute counts after its end (`deliveries`): zeros but for the span.
    end
        When everything has ended and is delivered: the makespan but for the span.
    """

    start: dict[Op, int]
    allocation: dict[Op, int]
    tail: dict[Op, int]
    fused: frozenset[tuple[int, int]]
    delivery: tuple[int, ...]
    end: int

    @property
    def length(self) -> int:
        """The makespan or the span."""
        return self.end - max(self.delivery)


def is_expressible(schedule: Schedule) -> bool:
    """Whether the models know every op of the schedule: no evictions, no optimizers, no pairs, and BW only where it
    needs less memory than B and W."""
    rows = schedule.compiled.rows
    dispensable = rows.of_kinds(Kind.BW) & ~needs_fused(schedule.problem)[rows.stage]
    return has_only_known_ops(schedule) and not dispensable.any() and not len(rows.first)


def split_dispensable(schedule: Schedule) -> Schedule:
    """The same schedule with B and W, one after the other, for every BW that needs no less memory than they do."""
    return split_backwards(schedule, keep=needs_fused(schedule.problem))


def place_on_grid(grid: Grid, schedule: Schedule, objective: Objective = "makespan") -> GridSchedule:
    """Times a schedule that `is_expressible` on the grid. Raises what `simulate` raises."""
    schedule = replace(schedule, problem=grid.rounded)
    timeline = schedule.timeline
    table = timeline.table.copy()
    rows, costs = timeline.rows, grid.problem.costs
    moved = rows.of_kinds(Kind.O, Kind.D, Kind.R)
    parts = np.where(
        moved, (1 + schedule.compiled.index.level[rows.stage, rows.microbatch]) * costs.parts[rows.stage], 0
    )
    table[:, PART] += parts
    ops = [Op(Kind(kind), stage, microbatch, part) for kind, stage, microbatch, part, _ in table.tolist()]
    delivery = deliveries(schedule, objective)
    left_of = tails(schedule, delivery)
    end = round(float((timeline.end + delivery[timeline.device] * timeline.rows.of_kinds(*COMPUTE)).max()))
    start: dict[Op, int] = {}
    tail: dict[Op, int] = {}
    for op, begin, left in zip(ops, map(round, timeline.start.tolist()), map(round, left_of), strict=True):
        done = 0
        for half in (op._replace(kind=Kind.B), op._replace(kind=Kind.W)) if op.kind == Kind.BW else (op,):
            start[half], tail[half] = begin + done, left - done
            done = grid.duration(half) if half.kind == Kind.B else 0
    moments, transfer = map(round, allocation_times(timeline).tolist()), timeline.rows.transfer.tolist()
    allocation = {op: min(at, end) for op, at, moving in zip(ops, moments, transfer, strict=True) if moving}
    fused = frozenset((op.stage, op.microbatch) for op in ops if op.kind == Kind.BW)
    return GridSchedule(start, allocation, tail, fused, tuple(map(round, delivery.tolist())), end)


def ensure_start(incumbents: Incumbents) -> Schedule | None:
    """The best schedule that models on a grid can express. Runs heuristics if there is none.

    The keeper keeps the best that `is_expressible`, which need not be the best of all.
    """
    if incumbents.best is not None:
        incumbents.offer(split_dispensable(incumbents.best))
    problem = incumbents.problem
    unpaired = problem.model_copy(update={"overlap_factor": None})  # the models know no pairs
    for name in reversed(HEURISTICS):
        if incumbents.best_of(is_expressible) is None:
            schedule = generate(name, unpaired, incumbents.objective)
            incumbents.offer(split_dispensable(replace(schedule, problem=problem)))
    return incumbents.best_of(is_expressible)
