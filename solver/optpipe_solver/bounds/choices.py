"""What can become of activations, and the least that a device needs for all of them: memory, link and compute."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations
from math import comb
from typing import NamedTuple

import numpy as np

from optpipe.model.arrays import Floats, Ints
from optpipe_solver import plan

MEMORY, OUT, BACK, COMPUTE = range(4)  # columns: ms of all of the device's memory, of its link each way, of compute
MOST = 100_000  # numbers of activations for each choice that are tried


class Weights(NamedTuple):
    """Ways to split one over memory, link and compute: arrays of one shape. Each makes one bound of three limits."""

    memory: Floats
    link: Floats
    compute: Floats


@cache
def all_weights() -> Weights:
    """Return all ways, in `plan.WEIGHT_STEPS` steps."""
    n = plan.WEIGHT_STEPS
    return Weights(*np.array([(a, b, n - a - b) for a in range(n + 1) for b in range(n + 1 - a)]).T / n)


def least_of_all(groups: Sequence[tuple[int, Floats]], fixed: Floats, once: Floats) -> float:
    """Return the least T for which every column suffices, over all choices for whole activations.

    Weights of the columns (`all_weights`) give a bound where a part of an activation may be chosen for; here none may.

    Parameters
    ----------
    groups
        Of activations that are alike: how many, and (choices, 4) what each choice costs, in ms.
    fixed
        (4,) what is needed whatever is chosen.
    once
        (4,) what is needed beside that in a column in which any choice costs something.

    Returns
    -------
    0 if there are more combinations than can be tried.
    """
    sums = np.zeros((1, 4))
    for count, costs in groups:
        ways = _undominated(costs)
        if comb(count + len(ways) - 1, count) * len(sums) > MOST:
            return 0.0
        chosen = _counts(count, len(ways)) @ ways
        sums = _undominated((sums[:, None] + chosen).reshape(-1, 4)) if len(groups) > 1 else chosen
    return float((sums + fixed + np.where(sums > 0, once, 0.0)).max(axis=1).min())


def _counts(count: int, ways: int) -> Ints:
    """(n, ways) all numbers that add up to `count`."""
    bars = np.array(list(combinations(range(count + ways - 1), ways - 1)), dtype=np.int64)
    bars = bars.reshape(comb(count + ways - 1, count), ways - 1)
    edges = np.c_[np.full(len(bars), -1), bars, np.full(len(bars), count + ways - 1)]
    counts: Ints = np.diff(edges, axis=1) - 1
    return counts


def _undominated(table: Floats) -> Floats:
    """The rows that no other row is as cheap as in every column; of a large table all rows."""
    costs: Floats = np.unique(table, axis=0)
    if len(costs) > 300:
        return costs
    worse = (costs[:, None] >= costs).all(axis=2).sum(axis=1) > 1  # each row is as cheap as itself
    kept: Floats = costs[~worse]
    return kept
