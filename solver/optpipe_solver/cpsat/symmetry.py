"""Alike is alike: micro-batches of one route, and equal parts of one activation, take their turns by number."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from optpipe.model.ops import Kind, Op

if TYPE_CHECKING:
    from optpipe_solver.cpsat.whole import WindowModel

F, B, W, O, D, R = Kind.F, Kind.B, Kind.W, Kind.O, Kind.D, Kind.R


def breaks(w: WindowModel) -> None:
    """Each order only where the incumbent keeps it, so that the incumbent stays a solution."""
    problem = w.problem
    for number, route in enumerate(problem.all_routes):
        batches = [j for j in range(problem.microbatches) if int(problem.costs.route[j]) == number]
        _microbatches(w, [Op(F, route[0], j) for j in batches])
        if w.order == "stages":
            for s in route:
                for kind in (
                    (F, B) if w.ticks.may_fuse(s) else (F, B, W)
                ):  # the W of a BW need not wait for that of a B before it
                    _microbatches(w, [Op(kind, s, j) for j in batches])
    for s, j in w.passes:
        parts = w.ticks.activations[s].parts
        for p, q in pairwise(range(len(parts))):
            if parts[p] == parts[q]:
                _parts(w, s, j, p, q)


def _microbatches(w: WindowModel, ops: list[Op]) -> None:
    """They pass a stage one after the other."""
    inside = [x for x in ops if x in w.inside]
    if _ascending(inside, w.begins):
        for x, y in pairwise(inside):
            w.model.add(w.at[y] >= w.at[x] + w.length(x))


def _parts(w: WindowModel, s: int, j: int, p: int, q: int) -> None:
    """q leaves only if p does, and after it, and comes back after it."""
    known, first, second = w.incumbent.start, w.leaves.get((s, j, p), True), w.leaves.get((s, j, q), True)
    if first is True or second is True or (Op(O, s, j, q) in known and Op(O, s, j, p) not in known):
        return
    pairs = [(Op(kind, s, j, p), Op(kind, s, j, q)) for kind in (O, D, R)]
    orders: list[tuple[dict[Op, Any], dict[Op, int]]] = [(w.at, known), (w.point, w.incumbent.point)]
    if all(before[x] <= before[y] for _, before in orders for x, y in pairs if y in before and x in before):
        w.model.add_implication(second, first)
        for now, _ in orders:
            for x, y in pairs:
                if x in now:
                    w.model.add(now[x] <= now[y]).only_enforce_if(second)


def _ascending(ops: list[Op], at: Callable[[Op], int]) -> bool:
    return all(at(x) <= at(y) for x, y in pairwise(ops))
