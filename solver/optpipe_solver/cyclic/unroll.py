"""From a pattern to a schedule: repeat it, keep the order, take the longest path."""

from __future__ import annotations

from dataclasses import replace

from optpipe.ops import Kind
from optpipe.schedule import Schedule
from optpipe.validity import check
from optpipe_solver.cpsat.ticks import Ticks
from optpipe_solver.cpsat.timed import timed
from optpipe_solver.cyclic.pattern import Pattern
from optpipe_solver.lift import lift


def unroll(ticks: Ticks, pattern: Pattern, method: str) -> Schedule:
    """The pattern over all micro-batches, each op at its place in the order of start times: the longest path starts it at the earliest."""
    m, K, T = ticks.problem.microbatches, pattern.microbatches, pattern.period
    starts = {op._replace(microbatch=j): at + (j // K) * T for op, at in pattern.starts.items() for j in range(op.microbatch, m, K)}
    return lift(ticks.problem, ticks.starts_ms(starts), method)


def repeat_within(ticks: Ticks, pattern: Pattern, short: Schedule) -> Schedule | None:
    """The schedule `short`, of fewer micro-batches, with periods of the pattern put in: at the place nearest to the middle where each
    costs a period, or at the best one; None where no place is valid. The numbers of micro-batches must differ by a multiple of K.
    """
    m, K, T = ticks.problem.microbatches, pattern.microbatches, pattern.period
    few = short.problem.microbatches
    known, periods = timed(replace(ticks, problem=short.problem), short).start, (m - few) // K
    if not periods:
        return short
    expected, found = short.makespan_ms + ticks.ms(periods * T), []
    for c in sorted(range(few - K + 1), key=lambda c: abs(2 * c + K - few)):
        starts = {}
        for x, at in known.items():
            if x.kind != Kind.D:
                copies = range(periods + 1) if c <= x.microbatch < c + K else (periods,) if x.microbatch >= c else (0,)
                starts.update({x._replace(microbatch=x.microbatch + i * K): at + i * T for i in copies})
        longer = lift(ticks.problem, ticks.starts_ms(starts), short.method)
        if not check(ticks.problem, longer):
            found.append(longer)
            if longer.makespan_ms <= expected * (1 + 1e-9):
                break
    return min(found, key=lambda schedule: schedule.makespan_ms, default=None)
