"""A schedule's order for another number of micro-batches: its steady state lasts longer, or not as long.

What lies between two cuts of the programs, where every op runs for the same number k of micro-batches, is repeated or
left out, and later micro-batches get other numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from optpipe.model.arrays import Floats, Ints, Table
from optpipe.model.ops import OPTIMIZER
from optpipe.model.problem import Problem
from optpipe.model.program import JOINED, KIND, MICROBATCH, PART, STAGE, Program, of_kinds
from optpipe.schedule import Schedule

PLACES = (1 / 2, 1 / 3, 2 / 3)  # of the makespan: where programs are cut
MOST_COMPARED = 64  # pairs of cuts next to such a place
NEVER = 2**31  # no micro-batch has this number


def recut(problem: Problem, schedule: Schedule) -> Iterator[Schedule]:
    """Yields schedules with the problem's number of micro-batches, those that repeat the fewest first.

    Parameters
    ----------
    schedule
        A valid one, of any problem with the same stages and placement, and with one route.

    Yields
    ------
    Schedules for this problem; whether they are valid, their reader checks.
    """
    before, after = schedule.problem.microbatches, problem.microbatches
    if len(problem.all_routes) > 1:
        return
    parts = [(before - after, -1)] if before > after else ((k, -(-(after - before) // k)) for k in range(1, before))
    for (k, times), place in product(parts, PLACES):
        found = _changed(schedule, k, times, place)
        surplus = before + k * times - after
        if found and surplus:
            found = None if found.compiled.complaints else _changed(found, surplus, -1, place)
        if found:
            yield replace(found, problem=problem)


def _changed(schedule: Schedule, k: int, times: int, place: float) -> Schedule | None:
    """The schedule with `k` micro-batches `times` more often, cut at a place of its makespan; None if a program has no
    such cuts."""
    problem, makespan_ms = schedule.problem, schedule.makespan_ms
    m = problem.microbatches
    half = k * makespan_ms / (m + len(schedule.programs)) / 2
    wanted = place * makespan_ms - half, place * makespan_ms + half

    def changed(program: Program, start: Floats) -> Program:
        start = np.minimum.accumulate(np.append(start, makespan_ms)[::-1])[::-1]
        far = [np.abs(start - ms) for ms in wanted]
        return _repeated(program.table, *_cuts(program.table, k, m, *far), k, times)

    rows, start = schedule.compiled.rows, schedule.timeline.start
    of_compute = np.where(rows.transfer, np.inf, start)
    try:
        programs = [changed(program, of_compute[rows.of_device(d)]) for d, program in enumerate(schedule.programs)]
        links = {
            link: changed(order, np.sort(start[rows.on_host_link & np.isin(rows.device, problem.shared_links[link])]))
            for link, order in schedule.links.items()
        }
    except LookupError:
        return None
    return Schedule(problem.replace(microbatches=m + k * times), tuple(programs), links, schedule.method)


def _repeated(table: Table, begin: int, end: int, k: int, times: int) -> Program:
    """The program with what lies between two cuts, `k` micro-batches, `times` more often; without it if -1."""
    pieces = [table[:begin], *(table[begin:end] for _ in range(times + 1)), table[end:]]
    result = np.concatenate(pieces)
    later = np.repeat([0, *range(0, (times + 1) * k, k), times * k], [len(piece) for piece in pieces])
    later[of_kinds(result, *OPTIMIZER)] = 0
    result[:, MICROBATCH] += later.astype(np.int32)
    return Program(result)


def _cuts(table: Table, k: int, m: int, far_begin: Floats, far_end: Floats) -> tuple[int, int]:
    """The begin and end of a part in which every op runs for `k` micro-batches in a row: the nearest of those that the
    program repeats, else of all. Raises LookupError if there is none."""
    low, high = _next_microbatch(table, m)
    n, most = len(table), k * len(low)  # ops of the part
    begins = np.sort(np.argsort(far_begin, kind="stable")[: 2 * most])
    begin, length = (found.ravel() for found in np.meshgrid(begins, np.arange(most + 1)))
    begin, length = begin[begin + length <= n], length[begin + length <= n]
    end = begin + length
    first = np.maximum(low[:, begin], low[:, end] - k)
    last = np.minimum(high[:, begin], high[:, end] - k)
    whole = np.append(table[:, JOINED] == 0, True)
    once = np.append(np.cumsum(of_kinds(table, *OPTIMIZER)), 0)
    possible = (first <= last).all(axis=0) & whole[begin - 1] & whole[end - 1] & (once[begin - 1] == once[end - 1])
    found = np.flatnonzero(possible)
    nearest = found[np.argsort(far_begin[begin[found]] + far_end[end[found]], kind="stable")][:MOST_COMPARED]
    parts = [(int(begin[i]), int(end[i])) for i in nearest]
    return next((part for part in parts if _goes_on(table, *part, k)), parts[0])


def _goes_on(table: Table, begin: int, end: int, k: int) -> bool:
    """Whether the part runs once more right before or behind, with other micro-batches."""
    part, other, length = table[begin:end], np.array([0, 0, k, 0, 0]), end - begin
    before, behind = table[max(0, begin - length) : begin], table[end : end + length]
    return np.array_equal(behind, part + other) or np.array_equal(before, part - other)


def _next_microbatch(table: Table, m: int) -> tuple[Ints, Ints]:
    """For each kind of op of a stage, and each place in a program: the lowest and the highest number of what can be
    called the next micro-batch there. All before it have run, and none behind it has. Of an op that all `m` run, `m` is
    the next one at the end."""
    n, each = len(table), ~of_kinds(table, *OPTIMIZER)
    _, kind = np.unique(table[each][:, [KIND, STAGE, PART]], axis=0, return_inverse=True)
    kind, row = kind.ravel(), np.flatnonzero(each)
    shape = (int(kind.max(initial=-1)) + 1, n + 1)
    run, to_come = np.zeros(shape, dtype=np.int64), np.full(shape, NEVER)
    to_come[np.bincount(kind, minlength=len(run)) == m, n] = m
    run[kind, row + 1] = table[each, MICROBATCH] + 1
    to_come[kind, row] = table[each, MICROBATCH]
    return np.maximum.accumulate(run, axis=1), np.minimum.accumulate(to_come[:, ::-1], axis=1)[:, ::-1]
