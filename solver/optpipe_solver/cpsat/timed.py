"""A schedule on the grid: when each op starts at the earliest, and how much must still follow it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from optpipe.evaluate.graph import flatten, is_transfer
from optpipe.model.arrays import Flags
from optpipe.model.ops import Kind, Op
from optpipe.model.program import JOINED, KIND, STAGE
from optpipe.schedule import Schedule
from optpipe_solver.cpsat.ticks import Ticks
from optpipe_solver.paths import apart, familiar, stands, tails


@dataclass(frozen=True)
class Timed:
    """Ticks by op, in the order of the programs; a BW is its B and its W, one after the other, and named in `fused` by
    stage and micro-batch."""

    start: dict[Op, int]  # F, B, W, C, O, D, R
    point: dict[
        Op, int
    ]  # O and R: where their bytes are allocated, at the start or, inside a compute op, before that op
    tail: dict[Op, int]  # from an op's start to the schedule's end, if all that must follow it follows at once
    fused: frozenset[tuple[int, int]]
    end: int


def covers(schedule: Schedule) -> bool:
    """Whether every op of the schedule is one that the models here know: no evictions, no optimizers, no pairs, and BW
    only where it needs less memory than B and W."""
    table, _ = flatten(schedule)
    dispensable = (table[:, KIND] == Kind.BW) & ~_needed(schedule)[table[:, STAGE]]
    return familiar(schedule) and not dispensable.any() and not table[:, JOINED].any()


def _needed(schedule: Schedule) -> Flags:
    """(S,) the stages whose BW needs less memory than B and W."""
    costs = schedule.problem.costs
    needed: Flags = costs.saved_for_weight > costs.activation
    return needed


def timed(ticks: Ticks, schedule: Schedule) -> Timed:
    """Raises what `simulate` raises; the schedule must be one that `covers` accepts."""
    schedule = replace(schedule, problem=ticks.rounded)
    timeline = schedule.timeline
    table = timeline.table
    ops = [Op(Kind(kind), stage, microbatch, part) for kind, stage, microbatch, part, _ in table.tolist()]
    end = round(timeline.makespan_ms)
    start: dict[Op, int] = {}
    tail: dict[Op, int] = {}
    for op, begins, left in zip(ops, map(round, timeline.start.tolist()), map(round, tails(schedule)), strict=True):
        lasts = 0
        for part in (op._replace(kind=Kind.B), op._replace(kind=Kind.W)) if op.kind == Kind.BW else (op,):
            start[part], tail[part] = begins + lasts, left - lasts
            lasts = ticks.lasts(part.kind, op.stage) if part.kind == Kind.B else 0
    standing = [min(at, end) for at in map(round, stands(timeline).tolist())]
    point = {op: at for op, at, moving in zip(ops, standing, is_transfer(table).tolist(), strict=True) if moving}
    fused = [op for op in ops if op.kind == Kind.BW]
    return Timed(start, point, tail, frozenset((op.stage, op.microbatch) for op in fused), end)


def split(schedule: Schedule) -> Schedule:
    """The same with B and W, one after the other, for every BW that needs no less memory."""
    return apart(schedule, sparing=_needed(schedule))
