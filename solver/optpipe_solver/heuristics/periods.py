"""`lengthened`: a long schedule from a short one.

List scheduling becomes periodic once the pipeline is full; the period is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optpipe.lift import TOLERANCE_MS
from optpipe.model.arrays import Floats, Ints, Table
from optpipe.model.ops import BACKWARD, Kind
from optpipe.model.program import KIND, MICROBATCH, PART, STAGE, of_kinds
from optpipe_solver import plan


@dataclass(frozen=True)
class Period:
    """From `begin` on, for `ms`, a number of micro-batches enter and as many leave; then everything repeats."""

    begin: float
    ms: float
    microbatches: int


def lengthened(table: Table, start: Floats, microbatches: int) -> tuple[Table, Floats] | None:
    """Return rows and starts (ms) for more micro-batches, with a period repeated as often as is needed.

    What is in flight when the period begins and when it ends differs by micro-batch numbers only, so what follows it
    may follow any copy. None if nothing repeats.
    """
    few = int(table[:, MICROBATCH].max(initial=-1)) + 1
    period = _period(table, start, few)
    if period is None:
        return None
    copies = -(-(microbatches - few) // period.microbatches)
    before = start < period.begin + period.ms - TOLERANCE_MS
    within = before & (start >= period.begin - TOLERANCE_MS)
    tables, starts = [table[before]], [start[before]]
    for i, rows in [*((i, within) for i in range(1, copies + 1)), (copies, ~before)]:
        later = table[rows].copy()
        later[:, MICROBATCH] += i * period.microbatches
        tables.append(later)
        starts.append(start[rows] + i * period.ms)
    longer, when = np.concatenate(tables), np.concatenate(starts)
    return _without(longer, when, few // 2, few + copies * period.microbatches - microbatches)


def _without(table: Table, start: Floats, first: int, count: int) -> tuple[Table, Floats]:
    """Leave some micro-batches out; those behind them take their numbers."""
    own = table[:, MICROBATCH]
    stays = (own < first) | (own >= first + count)
    table = table[stays].copy()
    table[:, MICROBATCH] -= np.where(table[:, MICROBATCH] >= first + count, count, 0).astype(np.int32)
    return table, start[stays]


def _period(table: Table, start: Floats, few: int) -> Period | None:
    """Find the shortest period in micro-batches; of several the one nearest to the middle."""
    order = np.argsort(start, kind="stable")
    when, own = start[order], table[order, MICROBATCH].astype(np.int64)
    op = _codes(table[order])
    first_stage = table[order, STAGE] == table[order[0], STAGE] if len(order) else np.zeros(0, np.bool_)
    leaves = when[first_stage & of_kinds(table[order], *BACKWARD)]
    leaves = leaves[leaves < when[first_stage & (table[order, KIND] == Kind.F)].max(initial=0.0)]  # while others enter
    for size in range(1, min(plan.REPEAT_MICROBATCHES, few // 3) + 1):
        for i in sorted(range(len(leaves) - size), key=lambda i: abs(2 * i + size - few)):
            period = Period(float(leaves[i]), float(leaves[i + size] - leaves[i]), size)
            if period.ms > 0 and _repeats(when, own, op, period):
                return period
    return None


def _codes(table: Table) -> Ints:
    """Return (n,) a number for each sort of op: kind, stage and part."""
    sizes = table.max(axis=0, initial=0).astype(np.int64) + 1
    codes: Ints = (table[:, KIND] * sizes[STAGE] + table[:, STAGE]) * sizes[PART] + table[:, PART]
    return codes


def _repeats(when: Floats, own: Ints, op: Ints, period: Period) -> bool:
    """Whether all that starts within the period starts a period later with the micro-batches behind."""
    a, b, c = np.searchsorted(when, period.begin + np.arange(3) * period.ms - TOLERANCE_MS)
    if b - a != c - b:
        return False
    now, then = (np.lexsort((own[x:y], op[x:y])) + x for x, y in ((a, b), (b, c)))
    return (
        np.array_equal(op[now], op[then])
        and np.array_equal(own[now] + period.microbatches, own[then])
        and bool((np.abs(when[now] + period.ms - when[then]) < TOLERANCE_MS).all())
    )
