"""Symmetries: equal micro-batches of one route can change places, and so can equal parts of one activation."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from optpipe.model.ops import Kind, Op
from optpipe_solver.cpsat.variables import Moment, Variables

F, B, W, O, D, R = Kind.F, Kind.B, Kind.W, Kind.O, Kind.D, Kind.R


def equal_microbatches_in_order(v: Variables) -> None:
    """Micro-batches go by number (Eq. 1), where those of the incumbent do: it has to stay a solution."""
    for batches in v.problem.costs.classes:
        route = v.problem.route(batches[0])
        _in_order(v, [Op(F, route[0], j) for j in batches])
        if v.order == "stages":
            for s in route:
                # The W of a BW need not wait for that of a B before it.
                for kind in (F, B) if v.grid.needs_fused[s] else (F, B, W):
                    _in_order(v, [Op(kind, s, j) for j in batches])


def fixed_order_of_entry(v: Variables) -> None:
    """Where the problem fixes the order of micro-batches, they enter each route in it."""
    if v.problem.fixed_order:
        for r, route in enumerate(v.problem.all_routes):
            entering = [Op(F, route[0], j) for j in range(v.problem.microbatches) if v.problem.costs.route[j] == r]
            for x, y in pairwise(entering):
                if x in v.free or y in v.free:
                    v.model.add(v.start[y] >= v.start[x] + v.duration(x))


def _in_order(v: Variables, ops: list[Op]) -> None:
    """The ops of a stage run in this order."""
    free = [x for x in ops if x in v.free]
    if all(v.incumbent_start(x) <= v.incumbent_start(y) for x, y in pairwise(free)):
        for x, y in pairwise(free):
            v.model.add(v.start[y] >= v.start[x] + v.duration(x))


def equal_parts_in_order(v: Variables) -> None:
    """Equal parts of an activation go by number, too."""
    for s, j in v.passes:
        parts = v.grid.parts(s, j)
        for p, q in pairwise(parts):
            if parts[p] == parts[q] and v.grid.level_of_part(s, p) == v.grid.level_of_part(s, q):
                _parts_in_order(v, s, j, p, q)


def _parts_in_order(v: Variables, s: int, j: int, p: int, q: int) -> None:
    """Part q leaves only if part p does, and after it, and comes back after it."""
    first, second = v.offloaded.get((s, j, p), True), v.offloaded.get((s, j, q), True)
    started = v.incumbent.start
    if first is True or second is True or (Op(O, s, j, q) in started and Op(O, s, j, p) not in started):
        return
    pairs = [(Op(kind, s, j, p), Op(kind, s, j, q)) for kind in (O, D, R)]
    moments: list[tuple[Mapping[Op, Moment], Mapping[Op, int]]] = [
        (v.start, started),
        (v.allocation, v.incumbent.allocation),
    ]
    if all(before[x] <= before[y] for _, before in moments for x, y in pairs if y in before and x in before):
        v.model.add_implication(second, first)
        for now, _ in moments:
            for x, y in pairs:
                if x in now:
                    v.model.add(now[x] <= now[y]).only_enforce_if(second)
