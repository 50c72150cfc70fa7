"""From a pattern to a schedule: repeat it and keep the order."""

from __future__ import annotations

from optpipe.lift import lift
from optpipe.schedule import Schedule
from optpipe_solver.cpsat.grid import Grid
from optpipe_solver.cyclic.pattern import Pattern


def unroll(grid: Grid, pattern: Pattern, method: str) -> Schedule:
    """Repeats the pattern over all micro-batches. Ops keep the order of their start times, and then start as early as
    they can."""
    m, K, T = grid.problem.microbatches, pattern.microbatches, pattern.period
    starts = {
        op._replace(microbatch=j): at + (j // K) * T
        for op, at in pattern.starts.items()
        for j in range(op.microbatch, m, K)
    }
    return lift(grid.problem, grid.starts_ms(starts), method)
