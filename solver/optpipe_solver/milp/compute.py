"""The rows of compute ops and of the objective, Eq. 1 to 8: one function for each family."""

from __future__ import annotations

from itertools import product

import numpy as np

from optpipe.evaluate.objective import TOLERANCE, Objective
from optpipe.model.costs import FORWARDS
from optpipe.model.ops import Kind, Op
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.milp.precedences import equal_microbatches
from optpipe_solver.milp.rows import TRUE
from optpipe_solver.milp.variables import Variables


def dependencies(v: Variables) -> None:
    """Eq. 5, 6 and 8, and the order of Eq. 1: `LongestPaths.arcs`."""
    for x, y, delay in v.paths.arcs:
        v.add_follows(v.E[y], v.E[x], v.paths.time[y] + delay)


def no_overlap_on_device(v: Variables) -> None:
    """Eq. 7: a device computes one op at a time. As printed it leaves out pairs of one kind and pairs of one
    micro-batch (`j' ≠ j, c' ≠ c`); any two ops of a device exclude each other."""
    for (x, y), P in v.P.items():
        if P != TRUE:
            v.add_follows(v.E[y], v.E[x], v.paths.time[y], when=(P,))


def makespan(v: Variables) -> None:
    """Eq. 4. The first forward of all starts at 0, so its start needs no term."""
    precedes_some = (v.paths.lag > -np.inf).any(axis=1)
    for x in np.flatnonzero(~precedes_some).tolist():
        v.add_follows(v.C, v.E[x])


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
