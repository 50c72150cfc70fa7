"""Triangle inequalities (section 4.1.2): of three things that have an order, the order of each two is no cycle.

The paper applies them "systematically across all precedence variables". So the compute ops of a device (P) are one
order, with the drop and the reload of each activation put into it (M, N), and so are the transfers of each link (K, L,
H). An order may lack pairs: what has no variable follows from others, or does not matter.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from itertools import combinations

import numpy as np

from optpipe.model.arrays import Floats
from optpipe.model.ops import Kind
from optpipe_solver.milp.rows import TRUE, Clause, Literal
from optpipe_solver.milp.variables import Variables

VIOLATED = 1e-6
MOST = 500  # cuts an order and round, the most violated first
Order = dict[tuple[Hashable, Hashable], Literal]  # by two nodes: whether the first precedes the second


def compute_orders(v: Variables) -> list[Order]:
    """P: an order for each device."""
    found: list[Order] = [{} for _ in v.problem.devices]
    for (x, y), P in v.P.items():
        found[v.paths.device[x]][x, y] = P
    return found


def all_orders(v: Variables) -> list[Order]:
    """P with M and N, and K with H and L."""
    devices = compute_orders(v)
    for kind, away in ((Kind.D, v.M), (Kind.R, v.N)):
        for (a, y), before in away.items():
            order = devices[v.paths.device[y]]
            order[(kind, a), y], order[y, (kind, a)] = before, ~before
    links: dict[tuple[int, bool], Order] = {}
    half_duplex = v.problem.transfer_mode == "half_duplex"
    for kind, literals in ((Kind.O, v.K), (Kind.R, v.L)):
        for (a, b), before in literals.items():
            link = int(v.costs.link[v.costs.device[a[0]]])
            links.setdefault((link, half_duplex or kind == Kind.O), {})[(kind, a), (kind, b)] = before
    for (a, b), before in v.H.items():
        order = links[int(v.costs.link[v.costs.device[a[0]]]), True]
        order[(Kind.O, a), (Kind.R, b)], order[(Kind.R, b), (Kind.O, a)] = before, ~before
        for c in (a, b):
            order[(Kind.O, c), (Kind.R, c)], order[(Kind.R, c), (Kind.O, c)] = TRUE, ~TRUE
    return [*devices, *links.values()]


class Triangles:
    """The cuts on the literals of some orders: before_xy + before_yz + before_zx is at most 2."""

    def __init__(self, orders: list[Order]) -> None:
        self._orders = orders = [order for order in orders if order]
        self._nodes = [list(dict.fromkeys(x for x, _ in order)) for order in orders]
        missing = Literal(-2)
        literals = [
            np.array([[order.get((x, y), missing) for y in nodes] for x in nodes])
            for order, nodes in zip(orders, self._nodes, strict=True)
        ]
        self._var = [of_order[:, :, 0] for of_order in literals]
        self._positive = [of_order[:, :, 1].astype(np.bool_) for of_order in literals]

    def all(self) -> Iterator[Clause]:
        """Both cuts of any three nodes."""
        for order, nodes in zip(self._orders, self._nodes, strict=True):
            for x, y, z in combinations(nodes, 3):
                if (x, y) in order and (y, z) in order and (z, x) in order:
                    yield _cut(order, x, y, z)
                    yield _cut(order, x, z, y)

    def violated(self, x: Floats) -> list[Clause]:
        """The cuts that a solution of the linear relaxation violates."""
        cuts = []
        for order, nodes, var, positive in zip(self._orders, self._nodes, self._var, self._positive, strict=True):
            known = np.where(var == -1, positive, np.nan)
            value = np.where(var < 0, known, np.where(positive, x[var], 1.0 - x[var]))
            excess = value[:, :, None] + value[None, :, :] + value.T[:, None, :] - 2.0
            k = np.arange(len(nodes))
            distinct = (k[:, None, None] < k[None, :, None]) & (k[:, None, None] < k[None, None, :]) & (k[:, None] != k)
            found = np.argwhere(distinct & (excess > VIOLATED))
            worst = np.argsort(-excess[tuple(found.T)], kind="stable")[:MOST]
            cuts += [_cut(order, *(nodes[k] for k in triple)) for triple in found[worst].tolist()]
        return cuts


def _cut(order: Mapping[tuple[Hashable, Hashable], Literal], x: Hashable, y: Hashable, z: Hashable) -> Clause:
    return ~order[x, y], ~order[y, z], ~order[z, x]
