"""A schedule on the grid: when each op starts at the earliest, and how much must still follow it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from optpipe.graph import ACROSS, dependencies, durations, flatten, is_transfer, streams
from optpipe.ops import Kind, Op
from optpipe.program import JOINED, KIND, Program
from optpipe.schedule import Schedule
from optpipe_solver.cpsat.ticks import Ticks


@dataclass(frozen=True)
class Timed:
    """Ticks by op. `point` is where a reload's bytes are allocated: at its start or, inside a compute op, before that op."""

    start: dict[Op, int]  # F, B, W, O, D, R
    point: dict[Op, int]  # R
    tail: dict[Op, int]  # from an op's start to the schedule's end, if all that must follow it follows at once
    end: int


def covers(schedule: Schedule) -> bool:
    """Whether every op of the schedule is one that the models here know."""
    table, _ = flatten(schedule)
    return not np.isin(table[:, KIND], [Kind.BW, Kind.C]).any() and not table[:, JOINED].any()


def timed(ticks: Ticks, schedule: Schedule) -> Timed:
    """Raises what `simulate` raises; the schedule must be one that `covers` accepts."""
    schedule = replace(schedule, problem=ticks.rounded)
    timeline = schedule.timeline
    table, device = timeline.table, timeline.device
    ops = [Op(Kind(kind), stage, microbatch, part) for kind, stage, microbatch, part, _ in table.tolist()]
    start = [round(at) for at in timeline.start.tolist()]
    point = {}
    moving = is_transfer(table).tolist()
    following = {d: round(timeline.makespan_ms) for d in set(device.tolist())}  # start of the next op on the compute stream
    for i in reversed(range(len(ops))):
        if not moving[i]:
            following[device[i]] = start[i]
        elif ops[i].kind == Kind.R:
            point[ops[i]] = min(start[i], following[device[i]])
    tail = _tails(schedule)
    return Timed(dict(zip(ops, start, strict=True)), point, dict(zip(ops, tail, strict=True)), round(timeline.makespan_ms))


def _tails(schedule: Schedule) -> list[int]:
    """The longest path from each op's start to the end: the same graph as `simulate`'s, backwards."""
    table, device = flatten(schedule)
    needs, delay = dependencies(schedule.problem, table, device)
    order, begins = streams(schedule.problem, schedule, table, device)
    before = np.full(len(table), -1)  # on the stream
    for a, b in pairwise(begins.tolist()):
        before[order[a + 1 : b]] = order[a : b - 1]
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
    """The same with every BW as B and W, one after the other."""
    programs = []
    for program in schedule.programs:
        table = program.table
        fused = table[:, KIND] == Kind.BW
        table = np.repeat(table, 1 + fused, axis=0)
        places = np.flatnonzero(fused) + np.arange(np.count_nonzero(fused))
        table[places, KIND], table[places + 1, KIND] = Kind.B, Kind.W
        programs.append(Program(table))
    return replace(schedule, programs=tuple(programs))
