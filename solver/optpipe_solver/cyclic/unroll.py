"""From a pattern to a schedule: repeat it, keep the order, take the longest path."""

from __future__ import annotations

from optpipe.schedule import Schedule
from optpipe_solver.cpsat.ticks import Ticks
from optpipe_solver.cyclic.pattern import Pattern
from optpipe_solver.lift import lift


def unroll(ticks: Ticks, pattern: Pattern, method: str) -> Schedule:
    """The pattern over all micro-batches, each op at its place in the order of start times: the longest path starts it
    at the earliest."""
    m, K, T = ticks.problem.microbatches, pattern.microbatches, pattern.period
    starts = {
        op._replace(microbatch=j): at + (j // K) * T
        for op, at in pattern.starts.items()
        for j in range(op.microbatch, m, K)
    }
    return lift(ticks.problem, ticks.starts_ms(starts), method)
