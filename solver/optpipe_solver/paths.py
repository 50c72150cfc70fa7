"""What engines need to know of a schedule beyond its times: what must follow each op, when transfers allocate, and the
same schedule with B and W for each BW."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from optpipe.evaluate.graph import ACROSS, is_transfer
from optpipe.evaluate.timeline import Timeline
from optpipe.model.arrays import Flags, Floats
from optpipe.model.ops import COMPUTE, Kind
from optpipe.model.program import KIND, STAGE, Program, of_kinds
from optpipe.schedule import Schedule

KNOWN = (*COMPUTE, Kind.O, Kind.D, Kind.R)


def has_only_known_ops(schedule: Schedule) -> bool:
    """Whether the engines' models know all of the schedule's kinds of ops: no evictions, no optimizer on the host."""
    return all(bool(of_kinds(program.table, *KNOWN).all()) for program in schedule.programs)


def tails(schedule: Schedule) -> list[float]:
    """The longest path from each op's start to the end, in ms, by rows of the timeline: `simulate`'s graph
    backwards."""
    compiled = schedule.compiled
    (needs, delay), before = compiled.needs, compiled.streams.before(len(compiled.rows))
    table, lasts = compiled.rows.table, compiled.durations_ms.tolist()
    waits = [[j for j in (*row, prior) if j >= 0] for row, prior in zip(needs.tolist(), before.tolist(), strict=True)]
    across, later = needs[:, ACROSS].tolist(), delay.tolist()
    followers = [0] * len(table)
    for row in waits:
        for j in row:
            followers[j] += 1
    tail: list[float] = list(lasts)
    ready = [i for i, n in enumerate(followers) if n == 0]
    while ready:
        i = ready.pop()
        for j in waits[i]:
            tail[j] = max(tail[j], lasts[j] + tail[i] + (later[i] if j == across[i] else 0.0))
            followers[j] -= 1
            if followers[j] == 0:
                ready.append(j)
    return tail


def allocation_times(timeline: Timeline) -> Floats:
    """(n,) when each op takes its place in its program, in ms.

    Of a transfer, which allocates then, this is its start or, where it waits for its link, the start of the next op on
    the compute stream.
    """
    found = timeline.start.copy()
    moving, device = is_transfer(timeline.table).tolist(), timeline.device.tolist()
    next_start = dict.fromkeys(device, np.inf)
    for i in reversed(range(len(found))):
        if moving[i]:
            found[i] = min(found[i], next_start[device[i]])
        else:
            next_start[device[i]] = found[i]
    return found


def split_backwards(schedule: Schedule, keep: Flags | None = None) -> Schedule:
    """The same schedule with B and W, one after the other, for every BW but those of the stages (S,) in `keep`."""
    programs = []
    for program in schedule.programs:
        fused = program.table[:, KIND] == Kind.BW
        if keep is not None:
            fused &= ~keep[program.table[:, STAGE]]
        table = np.repeat(program.table, 1 + fused, axis=0)
        rows = np.flatnonzero(fused) + np.arange(np.count_nonzero(fused))
        table[rows, KIND], table[rows + 1, KIND] = Kind.B, Kind.W
        programs.append(Program(table))
    return replace(schedule, programs=tuple(programs))
