"""Triangle inequalities (section 4.1.2): of three things that have an order, the order of each two is no cycle.

The paper applies them "systematically across all precedence variables". So the compute ops of a device (P) are one
order, with the drop and the reload of each activation put into it (M, N), and so are the transfers of each link (K, L,
H). An order may lack pairs: what has no variable follows from others, or does not matter.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import combinations

from optpipe.model.ops import Kind
from optpipe_solver.milp.rows import TRUE, Literal, Rows
from optpipe_solver.milp.variables import Variables

Order = dict[tuple[Hashable, Hashable], Literal]  # by two nodes: whether the first precedes the second


def no_cycles_of_three(rows: Rows, order: Order) -> None:
    """Of any three nodes, not all of x before y, y before z, and z before x; nor the other way round."""
    for x, y, z in combinations(dict.fromkeys(node for node, _ in order), 3):
        if (x, y) in order and (y, z) in order and (z, x) in order:
            rows.add_clause(~order[x, y], ~order[y, z], ~order[z, x])
            rows.add_clause(~order[x, z], ~order[z, y], ~order[y, x])


def compute_orders(v: Variables) -> list[Order]:
    """P: an order for each device."""
    orders: list[Order] = [{} for _ in v.problem.devices]
    for (x, y), P in v.P.items():
        orders[v.paths.device[x]][x, y] = P
    return orders


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
