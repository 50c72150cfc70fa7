"""`prune`: leave out offloads that buy nothing."""

from __future__ import annotations

import numpy as np

from optpipe.evaluate.rows import Rows
from optpipe.model.arrays import NONE, Floats, Table
from optpipe.model.ops import Kind
from optpipe.model.program import MICROBATCH, PART, STAGE, of_kinds
from optpipe.schedule import Schedule


def prune(schedule: Schedule) -> Schedule:
    """The same schedule without the offloads whose bytes fit all the time. Nothing starts later, since fewer ops wait
    for each other.

    Those go first that keep compute waiting longest: a drop for its offload's end, a backward for its reload's.
    """
    problem, compiled = schedule.problem, schedule.compiled
    rows, index, during = compiled.rows, compiled.index, compiled.held.during.copy()
    frees, limit = compiled.effects.frees, problem.costs.activation_budget
    waits, backward = _waits(rows, compiled.timeline.start, compiled.timeline.end), index.rows_of(Kind.B, Kind.BW)
    useless = np.zeros(index.parts(Kind.O).shape, dtype=np.bool_)
    offloads = []  # wait, and the rows of O, D and R
    for s, j, p in np.argwhere(index.parts(Kind.O) != NONE).tolist():
        offload, drop, reload = (int(index.parts(kind)[s, j, p]) for kind in (Kind.O, Kind.D, Kind.R))
        offloads.append((max(waits[drop], waits[backward[s, j]]), offload, drop, reload))
    for _, offload, drop, reload in sorted(offloads, key=lambda found: (-found[0], found[1])):
        away = slice(drop + 1, reload)
        if during[away].max(initial=0) + frees[drop] <= limit[rows.device[offload]]:
            during[away] += frees[drop]
            useless[tuple(rows.table[offload, STAGE : PART + 1])] = True

    def useful(table: Table) -> Table:
        moves = of_kinds(table, Kind.O, Kind.D, Kind.R)
        part = np.where(moves, table[:, PART], 0)
        return table[~(moves & useless[table[:, STAGE], table[:, MICROBATCH], part])]

    return schedule.with_tables(useful) if useless.any() else schedule


def _waits(rows: Rows, start: Floats, end: Floats) -> Floats:
    """(n,) how long each op's compute stream stood still before it; 0 for transfers and first ops."""
    waits = np.zeros(len(rows))
    stream = np.flatnonzero(~rows.transfer)
    after = rows.device[stream[1:]] == rows.device[stream[:-1]]
    waits[stream[1:][after]] = (start[stream[1:]] - end[stream[:-1]])[after]
    return waits
