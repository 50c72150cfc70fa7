"""Pairs: a forward and a backward that take less time together are joined if they are neighbours in a program."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from optpipe.errors import OptPipeError
from optpipe.evaluate.memory import device_bytes
from optpipe.model.ops import BACKWARD, Kind
from optpipe.model.program import JOINED, KIND, MICROBATCH, Program
from optpipe.schedule import Schedule, check

AT_ONCE_MS = 1e-6  # between two ops that follow each other at once


def join_pairs(schedule: Schedule) -> Schedule | None:
    """Join a forward and a backward of different micro-batches that follow each other at once, if memory holds both.

    Returns None if the problem has no `overlap_factor`, if there is nothing to join, or if the result is not valid.
    """
    problem = schedule.problem
    if problem.overlap_factor is None:
        return None
    timeline = schedule.timeline
    table, device = timeline.table.copy(), timeline.device
    taken, freed = device_bytes(problem, table)
    forward, backward = table[:, KIND] == Kind.F, np.isin(table[:, KIND], list(BACKWARD))
    a, b = slice(None, -1), slice(1, None)
    fit = (device[a] == device[b]) & (table[a, MICROBATCH] != table[b, MICROBATCH])
    fit &= ((forward[a] & backward[b]) | (backward[a] & forward[b])) & (
        timeline.start[b] - timeline.end[a] < AT_ONCE_MS
    )
    fit &= (table[a, JOINED] == 0) & (table[b, JOINED] == 0) & (np.r_[0, table[:-2, JOINED]] == 0)
    for d, limit in enumerate(problem.costs.activation_budget.tolist()):
        own = np.flatnonzero(device == d)
        during = np.cumsum(taken[own]) - np.cumsum(freed[own]) + freed[own]
        fit[own[:-1]] &= during[:-1] + taken[own[1:]] <= limit
    joined = -2
    for i in np.flatnonzero(fit).tolist():
        if i > joined + 1:
            table[i, JOINED], joined = 1, i
    found = replace(schedule, programs=tuple(Program(table[device == d]) for d in range(len(problem.devices))))
    try:
        return None if joined < 0 or check(problem, found) else found
    except OptPipeError:  # ops that ran one after the other wait for each other now
        return None
