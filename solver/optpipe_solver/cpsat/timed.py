"""A schedule on the grid: when each op starts at the earliest, and how much must still follow it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from optpipe.graph import ACROSS, dependencies, durations, flatten, is_transfer, streams
from optpipe.ops import Kind, Op
from optpipe.program import JOINED, KIND, STAGE, Program
from optpipe.schedule import Schedule
from optpipe_solver.cpsat.ticks import Ticks


@dataclass(frozen=True)
class Timed:
    """Ticks by op, in the order of the programs; a BW is its B and its W, one after the other, and named in `fused` by stage and
    micro-batch."""

    start: dict[Op, int]  # F, B, W, C, O, D, R
    point: dict[Op, int]  # O and R: where their bytes are allocated, at the start or, inside a compute op, before that op
    tail: dict[Op, int]  # from an op's start to the schedule's end, if all that must follow it follows at once
    fused: frozenset[tuple[int, int]]
    end: int


def covers(schedule: Schedule) -> bool:
    """Whether every op of the schedule is one that the models here know: no pairs, and BW only where it needs less memory than B and W."""
    table, _ = flatten(schedule)
    return not _dispensable(schedule, table).any() and not table[:, JOINED].any()


def _dispensable(schedule: Schedule, table: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Marks BWs that B and W could stand for: they need no more memory."""
    costs = schedule.problem.costs
    found: NDArray[np.bool_] = (table[:, KIND] == Kind.BW) & (costs.weight_grad <= costs.activation)[table[:, STAGE]]
    return found


def timed(ticks: Ticks, schedule: Schedule) -> Timed:
    """Raises what `simulate` raises; the schedule must be one that `covers` accepts."""
    schedule = replace(schedule, problem=ticks.rounded)
    timeline = schedule.timeline
    table, device = timeline.table, timeline.device
    ops = [Op(Kind(kind), stage, microbatch, part) for kind, stage, microbatch, part, _ in table.tolist()]
    end = round(timeline.makespan_ms)
    start: dict[Op, int] = {}
    tail: dict[Op, int] = {}
    for op, begins, left in zip(ops, (round(at) for at in timeline.start.tolist()), _tails(schedule), strict=True):
        lasts = 0
        for part in (op._replace(kind=Kind.B), op._replace(kind=Kind.W)) if op.kind == Kind.BW else (op,):
            start[part], tail[part] = begins + lasts, left - lasts
            lasts = ticks.lasts(part.kind, op.stage) if part.kind == Kind.B else 0
    point = {}
    moving = is_transfer(table).tolist()
    following = dict.fromkeys(device.tolist(), end)  # start of the next op on the compute stream
    for i in reversed(range(len(ops))):
        began = round(timeline.start[i])
        if moving[i]:
            point[ops[i]] = min(began, following[device[i]])
        else:
            following[device[i]] = began
    fused = [op for op in ops if op.kind == Kind.BW]
    return Timed(start, point, tail, frozenset((op.stage, op.microbatch) for op in fused), end)


def _tails(schedule: Schedule) -> list[int]:
    """The longest path from each op's start to the end: the same graph as `simulate`'s, backwards."""
    table, device = flatten(schedule)
    needs, delay = dependencies(schedule.problem, table, device)
    order, begins = streams(schedule.problem, schedule, table, device)
    before = np.full(len(table), -1)  # on the stream
    for a, b in pairwise(begins.tolist()):
        stream = order[a:b]
        before[stream[1:]] = stream[:-1]
    waits = [[j for j in (*row, prior) if j >= 0] for row, prior in zip(needs.tolist(), before.tolist(), strict=True)]
    across = needs[:, ACROSS].tolist()
    later = np.rint(delay).astype(int).tolist()
    lasts = np.rint(durations(schedule.problem, table)).astype(int).tolist()
    followers = [0] * len(table)
    for row in waits:
        for j in row:
            followers[j] += 1
    tail = list(lasts)
    ready = [i for i, n in enumerate(followers) if n == 0]
    while ready:
        i = ready.pop()
        for j in waits[i]:
            tail[j] = max(tail[j], lasts[j] + tail[i] + (later[i] if j == across[i] else 0))
            followers[j] -= 1
            if followers[j] == 0:
                ready.append(j)
    return tail


def split(schedule: Schedule) -> Schedule:
    """The same with B and W, one after the other, for every BW that needs no less memory."""
    programs = []
    for program in schedule.programs:
        table = program.table
        fused = _dispensable(schedule, table)
        table = np.repeat(table, 1 + fused, axis=0)
        places = np.flatnonzero(fused) + np.arange(np.count_nonzero(fused))
        table[places, KIND], table[places + 1, KIND] = Kind.B, Kind.W
        programs.append(Program(table))
    return replace(schedule, programs=tuple(programs))
