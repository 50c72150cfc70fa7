"""A schedule on the grid: when each op starts at the earliest, and how much must still follow it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from optpipe.model.ops import Kind, Op
from optpipe.schedule import Schedule
from optpipe_solver.cpsat.grid import Grid
from optpipe_solver.paths import allocation_times, has_only_known_ops, needs_fused, split_backwards, tails


@dataclass(frozen=True)
class GridSchedule:
    """A schedule on the grid: ticks by op, in the order of the programs. A BW is its B and, right after it, its W.

    Attributes
    ----------
    start
        Of F, B, W, C, O, D and R.
    allocation
        When O and R allocate their bytes: at their start or, inside a compute op, before that op.
    tail
        From an op's start to the schedule's end, if all that must follow it follows at once.
    fused
        Stage and micro-batch of each BW.
    end
        The makespan.
    """

    start: dict[Op, int]
    allocation: dict[Op, int]
    tail: dict[Op, int]
    fused: frozenset[tuple[int, int]]
    end: int


def is_expressible(schedule: Schedule) -> bool:
    """Whether the models know every op of the schedule: no evictions, no optimizers, no pairs, and BW only where it
    needs less memory than B and W."""
    rows = schedule.compiled.rows
    dispensable = rows.of_kinds(Kind.BW) & ~needs_fused(schedule.problem)[rows.stage]
    return has_only_known_ops(schedule) and not dispensable.any() and not len(rows.first)


def split_dispensable(schedule: Schedule) -> Schedule:
    """The same schedule with B and W, one after the other, for every BW that needs no less memory than they do."""
    return split_backwards(schedule, keep=needs_fused(schedule.problem))


def place_on_grid(grid: Grid, schedule: Schedule) -> GridSchedule:
    """Times a schedule that `is_expressible` on the grid. Raises what `simulate` raises."""
    schedule = replace(schedule, problem=grid.rounded)
    timeline = schedule.timeline
    table = timeline.table
    ops = [Op(Kind(kind), stage, microbatch, part) for kind, stage, microbatch, part, _ in table.tolist()]
    end = round(timeline.makespan_ms)
    start: dict[Op, int] = {}
    tail: dict[Op, int] = {}
    for op, begin, left in zip(ops, map(round, timeline.start.tolist()), map(round, tails(schedule)), strict=True):
        done = 0
        for half in (op._replace(kind=Kind.B), op._replace(kind=Kind.W)) if op.kind == Kind.BW else (op,):
            start[half], tail[half] = begin + done, left - done
            done = grid.duration(half.kind, op.stage) if half.kind == Kind.B else 0
    moments, transfer = map(round, allocation_times(timeline).tolist()), timeline.rows.transfer.tolist()
    allocation = {op: min(at, end) for op, at, moving in zip(ops, moments, transfer, strict=True) if moving}
    fused = frozenset((op.stage, op.microbatch) for op in ops if op.kind == Kind.BW)
    return GridSchedule(start, allocation, tail, fused, end)
