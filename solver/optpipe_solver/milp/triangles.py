"""Triangle inequalities (section 4.1.2): of three ops on a device, the order of each two is no cycle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optpipe.model.arrays import Floats
from optpipe_solver.milp.rows import Clause, Literal

VIOLATED = 1e-6
MOST = 500  # cuts a device and round, the most violated first


class Triangles:
    """The cuts on the order literals `P` of ops on the same of all devices (n,): P_xy + P_yz + P_zx is at most 2."""

    def __init__(self, P: Mapping[tuple[int, int], Literal], device: NDArray[np.integer[Any]]) -> None:
        self._P = P
        self._ops = [np.flatnonzero(device == d) for d in np.unique(device)]
        self._var = [
            np.array([[P.get((x, y), Literal(-1)).var for y in own] for x in own])
            for own in map(np.ndarray.tolist, self._ops)
        ]
        self._positive = [
            np.array([[P.get((x, y), Literal(-1)).positive for y in own] for x in own])
            for own in map(np.ndarray.tolist, self._ops)
        ]

    def all(self) -> Iterator[Clause]:
        """Both cuts of any three ops."""
        for own in self._ops:
            for x, y, z in combinations(own.tolist(), 3):
                yield self._cut(x, y, z)
                yield self._cut(x, z, y)

    def violated(self, x: Floats) -> list[Clause]:
        """The cuts that a solution of the linear relaxation violates."""
        cuts = []
        for own, var, positive in zip(self._ops, self._var, self._positive, strict=True):
            value = np.where(var < 0, positive, np.where(positive, x[var], 1.0 - x[var]))
            excess = value[:, :, None] + value[None, :, :] + value.T[:, None, :] - 2.0
            k = np.arange(len(own))
            distinct = (k[:, None, None] < k[None, :, None]) & (k[:, None, None] < k[None, None, :]) & (k[:, None] != k)
            found = np.argwhere(distinct & (excess > VIOLATED))
            worst = np.argsort(-excess[tuple(found.T)], kind="stable")[:MOST]
            cuts += [self._cut(*own[triple].tolist()) for triple in found[worst]]
        return cuts

    def _cut(self, x: int, y: int, z: int) -> Clause:
        return ~self._P[x, y], ~self._P[y, z], ~self._P[z, x]
