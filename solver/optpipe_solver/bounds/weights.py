"""Weights of a device's memory, link and compute: each choice of them makes one bound of three limits."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from optpipe.model.arrays import Floats
from optpipe_solver import plan


class Weights(NamedTuple):
    """Ways to split one over memory, link and compute; arrays of one shape."""

    memory: Floats
    link: Floats
    compute: Floats


@cache
def weights() -> Weights:
    """Return all ways to split one, in `plan.WEIGHT_STEPS` steps."""
    n = plan.WEIGHT_STEPS
    points = [(a, b, n - a - b) for a in range(n + 1) for b in range(n + 1 - a)]
    return Weights(*(np.array(points).T / n))
