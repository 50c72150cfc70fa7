"""What holds for every schedule of a problem, found without a search: lower bounds on its length, and the least memory
that it needs (`least_memory`)."""

from __future__ import annotations

from optpipe_solver.bounds.length import deferral_bound, lower_bound, memory_bound, trivial_bound
from optpipe_solver.bounds.ramp import ramp_bound

__all__ = ["deferral_bound", "lower_bound", "memory_bound", "ramp_bound", "trivial_bound"]
