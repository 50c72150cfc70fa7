"""A warm start becomes a schedule of the problem: as it is, in more parts, or repaired."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from optpipe.model.arrays import Ints, Table
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.program import PART, STAGE, of_kinds
from optpipe.process.protocol import Programs
from optpipe.reuse import repair
from optpipe.schedule import Schedule


def schedules_of(problem: Problem, start: Programs) -> Iterator[Schedule]:
    """Yield the warm start with today's costs and, for a caller who finds that invalid, what can be made of it.

    Its stages are taken for those of the problem, whatever placement it names. Raises InputError if an op cannot be
    read.
    """
    schedule = start.model_copy(update={"placement": None}).schedule(problem, start.method or "warm start")
    yield schedule
    yield from filter(None, [in_all_parts(schedule)])
    yield from filter(None, [repair(problem, schedule)])


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
    pieces: Ints = np.where(parts % used == 0, parts // used, 1)

    def divided(table: Table) -> Table:
        moves = of_kinds(table, Kind.O, Kind.D, Kind.R)
        count = np.where(moves, pieces[table[:, STAGE]], 1)
        table = np.repeat(table, count, axis=0)
        nth = np.arange(len(table)) - np.repeat(np.cumsum(count) - count, count)
        table[:, PART] = table[:, PART] * np.repeat(count, count) + nth
        return table

    return None if (pieces == 1).all() else schedule.with_tables(divided)
