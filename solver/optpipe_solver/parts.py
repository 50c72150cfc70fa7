"""Schedules of problems whose activations leave in few parts, for problems with more of them."""

from __future__ import annotations

import numpy as np

from optpipe.model.arrays import Ints, Table
from optpipe.model.ops import Kind
from optpipe.model.program import PART, STAGE, of_kinds
from optpipe.schedule import Schedule


def in_all_parts(schedule: Schedule) -> Schedule | None:
    """The schedule in which activations leave in all their parts, taken for one of a problem with fewer.

    Where a stage's transfers move parts 0 to k - 1 of n, k a divisor of n, each was for the n-th part of k: it becomes
    n / k transfers, one right after the other, of as many bytes in as much time. So what is valid with few parts is
    valid, and as long, with more.

    Returns
    -------
    None if no stage's parts divide like that.
    """
    parts = schedule.problem.costs.parts
    used = np.ones_like(parts)
    for program in schedule.programs:
        moved = program.table[of_kinds(program.table, Kind.O, Kind.D, Kind.R)]
        np.maximum.at(used, moved[:, STAGE], moved[:, PART] + 1)
    pieces = np.where(parts % used == 0, parts // used, 1)
    if (pieces == 1).all():
        return None
    return schedule.with_tables(lambda table: _divided(table, pieces))


def _divided(table: Table, pieces: Ints) -> Table:
    """The table with so many transfers or drops of each stage in the place of one."""
    moves = of_kinds(table, Kind.O, Kind.D, Kind.R)
    count = np.where(moves, pieces[table[:, STAGE]], 1)
    table = np.repeat(table, count, axis=0)
    nth = np.arange(len(table)) - np.repeat(np.cumsum(count) - count, count)
    table[:, PART] = table[:, PART] * np.repeat(count, count) + nth
    return table
