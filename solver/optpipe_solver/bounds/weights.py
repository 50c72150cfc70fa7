"""Weights of a device's memory, link and compute: each choice of them makes one bound of three limits."""

from __future__ import annotations

from functools import cache

import numpy as np

from optpipe.model.arrays import Floats
from optpipe_solver import plan


@cache
def weights() -> tuple[Floats, Floats, Floats]:
    """Return all ways to split one over memory, link and compute, in `plan.WEIGHT_STEPS` steps; arrays of one shape."""
    n = plan.WEIGHT_STEPS
    memory, link, compute = np.array([(a, b, n - a - b) for a in range(n + 1) for b in range(n + 1 - a)]).T / n
    return memory, link, compute
