"""The rows of compute ops and of transfers, Eq. 1 to 8, 10 to 13, 18 and 19, and triangle inequalities: one function
for each family.

The paper offloads "the activations of (i, j, c)" for any c; what a problem lets leave is what F produced, so O, R and W
are of (i, j).
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import combinations, product

import numpy as np

from optpipe.evaluate.objective import TOLERANCE, Objective
from optpipe.model.costs import FORWARDS
from optpipe.model.ops import Kind, Op
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.milp.precedences import equal_microbatches
from optpipe_solver.milp.rows import TRUE, Literal, Rows
from optpipe_solver.milp.variables import Variables

Order = dict[tuple[Hashable, Hashable], Literal]  # by two nodes: whether the first precedes the second


def dependencies(v: Variables) -> None:
    """Eq. 5, 6 and 8, and the order of Eq. 1: `LongestPaths.arcs`."""
    for x, y, delay in v.paths.arcs:
        v.rows.add_follows(v.E[y], v.E[x], v.paths.time[y] + delay)


def no_overlap_on_device(v: Variables) -> None:
    """Eq. 7: a device computes one op at a time. As printed it leaves out pairs of one kind and pairs of one
    micro-batch (`j' ≠ j, c' ≠ c`); any two ops of a device exclude each other."""
    for (x, y), P in v.P.items():
        if P != TRUE:
            v.rows.add_follows(v.E[y], v.E[x], v.paths.time[y], when=(P,))


def makespan(v: Variables) -> None:
    """Eq. 4. The first forward of all starts at 0, so its start needs no term."""
    precedes_some = (v.paths.lag > -np.inf).any(axis=1)
    for x in np.flatnonzero(~precedes_some).tolist():
        v.rows.add_follows(v.C, v.E[x])


def span(v: Variables) -> None:
    """Eq. 3: device by device, from the first start to the last end. As printed, the first op is F of micro-batch 1 and
    the last one W of micro-batch m; here any op counts that may be first, and any that may be last."""
    paths = v.paths
    follows_on_device = (paths.lag > -np.inf) & (paths.device[:, None] == paths.device)
    firsts, lasts = ~follows_on_device.any(axis=0), ~follows_on_device.any(axis=1)
    for x, y in product(np.flatnonzero(firsts).tolist(), np.flatnonzero(lasts).tolist()):
        if paths.device[x] == paths.device[y]:
            v.rows.add([(1.0, v.C), (1.0, v.E[x]), (-1.0, v.E[y])], (), paths.time[x])


def first_forward_at_once(v: Variables) -> None:
    """Not of the paper: Eq. 3 must not gain by starting a device late. What it computes first, a forward of the first
    stage that it has on a route, starts in any simulated schedule as soon as it has arrived."""
    paths, arrivals = v.paths, _first_arrivals(v)
    for x, before in arrivals.items():
        others = [y for y in arrivals if y != x and paths.device[y] == paths.device[x]]
        _, stage, microbatch, _ = paths.ops[x]
        gap = float(paths.time[x] + v.costs.message_ms[FORWARDS, stage, microbatch] * paths.scale)
        arrives = [(1.0, v.E[before])] if before is not None else []
        late = max(0.0, v.rows.upper[v.E[x]] - gap)
        v.rows.add([(-1.0, v.E[x]), *arrives], [(late, v.P[y, x]) for y in others], -gap)


def _first_arrivals(v: Variables) -> dict[int, int | None]:
    """The forwards that a device may compute first, each with the forward that it waits for."""
    number, arrivals = v.paths.number, dict[int, int | None]()
    for route, batches in equal_microbatches(v.problem):
        devices = [v.problem.stages[s].device for s in route]
        for k, s in enumerate(route):
            if devices[k] not in devices[:k]:
                for j in batches:
                    arrivals[number[Op(Kind.F, s, j)]] = number[Op(Kind.F, route[k - 1], j)] if k else None
    return arrivals


def work_before_and_after(v: Variables, objective: Objective) -> None:
    """Valid cuts: an op waits for all the work of its device that precedes it, and all that follows it comes before the
    end; nothing beats the trivial bound."""
    paths, add = v.paths, v.rows.add
    trivial = trivial_bound(v.problem, objective) * paths.scale * (1 - TOLERANCE)
    v.rows.lower[v.C] = max(v.rows.lower[v.C], trivial)
    for y, E in enumerate(v.E):
        same_device = paths.device == paths.device[y]
        others = [x for x in np.flatnonzero(same_device).tolist() if x != y]
        soonest = float(paths.head[same_device].min())
        add([(1.0, E)], [(-float(paths.time[x]), v.P[x, y]) for x in others], soonest + float(paths.time[y]))
        if objective == "makespan":
            rest = float((paths.tail - paths.time)[same_device].min())
            add([(1.0, v.C), (-1.0, E)], [(-float(paths.time[x]), v.P[y, x]) for x in others], rest)


def forward_offload_reload_backward(v: Variables) -> None:
    """F, then O, its drop, R, then B, as section 3.3 tells; the appendix prints no equation for it."""
    for a in v.activations:
        F, B = v.number(Kind.F, a), v.number(Kind.B, a)
        when = () if v.keeps_place(a) else (v.W[a],)
        v.rows.add_follows(v.O[a], v.E[F])
        v.rows.add_follows(v.A[a], v.O[a], span=v.transfer_span(Kind.O, a))
        v.rows.add_follows(v.R[a], v.A[a])
        v.rows.add_follows(v.E[B], v.R[a], float(v.paths.time[B]), v.transfer_span(Kind.R, a), when)


def no_overlap_on_link(v: Variables) -> None:
    """Eq. 10 to 13: transfers on a link run one at a time; and Eq. 18 and 19 for those of two devices.

    A transfer that is not made has no length: only the length is multiplied by W, and the order needs no (1 - W). As
    printed Eq. 18 and 19 lack their big-M (L alone, at most 1, would relax them by one unit of time), have L where K is
    meant, relate a micro-batch to itself only, and leave out O of one device against R of the other. Any two transfers
    on a link exclude each other, so the rows are those of Eq. 10 to 13.
    """
    for a, b in v.K:
        offload, reload = v.transfer_span(Kind.O, a), v.transfer_span(Kind.R, a)
        v.rows.add_follows(v.O[b], v.O[a], span=offload, when=(v.K[a, b],))  # Eq. 10
        v.rows.add_follows(v.R[b], v.R[a], span=reload, when=(v.L[a, b],))  # Eq. 11
        if H := v.H.get((a, b)):  # Eq. 12 and 13, where the link is half duplex
            v.rows.add_follows(v.R[b], v.O[a], span=offload, when=(H,))
            v.rows.add_follows(v.O[a], v.R[b], span=v.transfer_span(Kind.R, b), when=(~H,))


def reloads_allocate_in_link_order(v: Variables) -> None:
    """Not of the paper: reloads of a device allocate in the order that they have on the link."""
    for (a, b), L in v.L.items():
        if v.costs.device[a[0]] == v.costs.device[b[0]]:
            v.rows.add_follows(v.A[b], v.A[a], when=(L, v.W[a], v.W[b]))


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
