"""`prune`: leave out offloads that buy nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from optpipe.evaluate.rows import Rows
from optpipe.model.arrays import NONE, Flags, Floats
from optpipe.model.ops import Kind
from optpipe.model.program import Program
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
    keep = np.ones(len(rows), dtype=np.bool_)
    offloads = []  # wait, and the rows of O, D and R
    for s, j, p in np.argwhere(index.parts(Kind.O) != NONE).tolist():
        offload, drop, reload = (int(index.parts(kind)[s, j, p]) for kind in (Kind.O, Kind.D, Kind.R))
        offloads.append((max(waits[drop], waits[backward[s, j]]), offload, drop, reload))
    for _, offload, drop, reload in sorted(offloads, key=lambda found: (-found[0], found[1])):
        away = slice(drop + 1, reload)
        if during[away].max(initial=0) + frees[drop] <= limit[rows.device[offload]]:
            during[away] += frees[drop]
            keep[[offload, drop, reload]] = False
    return schedule if keep.all() else _only(schedule, rows, keep)


def _waits(rows: Rows, start: Floats, end: Floats) -> Floats:
    """(n,) how long each op's compute stream stood still before it; 0 for transfers and first ops."""
    waits = np.zeros(len(rows))
    stream = np.flatnonzero(~rows.transfer)
    after = rows.device[stream[1:]] == rows.device[stream[:-1]]
    waits[stream[1:][after]] = (start[stream[1:]] - end[stream[:-1]])[after]
    return waits


def _only(schedule: Schedule, rows: Rows, keep: Flags) -> Schedule:
    """The schedule's rows that are marked."""
    kept = {tuple(row) for row in rows.table[keep, :4].tolist()}
    links = {
        link: Program(order.table[[tuple(row) in kept for row in order.table[:, :4].tolist()]])
        for link, order in schedule.links.items()
    }
    return replace(
        schedule,
        programs=tuple(Program(rows.table[(rows.device == d) & keep]) for d in range(len(schedule.programs))),
        links={link: order for link, order in links.items() if len(order)},
    )
