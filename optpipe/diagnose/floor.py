"""What no order of a step's ops falls below."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optpipe.model.arrays import Floats
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem


def floor_of(forward: Floats, backward: Floats, weight: Floats, where: Sequence[int]) -> float:
    """On some device: what must run before its first op, then its ops, and what must run after its last backward.

    Parameters
    ----------
    forward, backward, weight
        (S, m) the times of F, of B or BW, and of W, in ms. Messages are left out.
    where
        By stage: its device.
    """
    before, after = (np.cumsum(each, axis=0) - each for each in (forward, backward))
    head, tail = before.min(axis=1), after.min(axis=1)
    chain = (forward + backward).sum(axis=1)
    work, floor = chain + weight.sum(axis=1), 0.0
    for d in range(1 + max(where)):
        on = [s for s, device in enumerate(where) if device == d]
        if on:
            floor = max(floor, head[on].min() + max(work[on].sum(), chain[on].sum() + tail[on].min()))
    return float(floor)


def floor_ms(problem: Problem) -> float:
    """The same of a problem of one route."""
    ms = problem.costs.ms
    return floor_of(ms[Kind.F], ms[Kind.B], ms[Kind.W], [stage.device for stage in problem.stages])
