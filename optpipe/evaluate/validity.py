"""What is wrong with programs, whatever the clock does: ops that are missing, doubled, or in the wrong order."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from optpipe.evaluate.rows import Index, Rows
from optpipe.model.arrays import OFF_ROUTE, Flags
from optpipe.model.ops import BACKWARD, KINDS, Kind
from optpipe.model.problem import Problem
from optpipe.model.program import Program

MOST = 20  # sentences of one sort; a broken schedule of 200,000 ops is not listed in full


def complaints(problem: Problem, links: Mapping[str, Program], rows: Rows, index: Index) -> list[str]:
    """Everything that is wrong with the programs, one sentence each, for rows that the problem knows."""
    return [
        *_twice(rows),
        *_missing(problem, rows, index),
        *_out_of_order(rows, index),
        *_bad_pairs(rows),
        *_out_of_fixed_order(problem, rows, index),
        *(f"links[{link!r}]: no two devices share such a link" for link in links if link not in problem.shared_links),
    ]


def _twice(rows: Rows) -> list[str]:
    if len(rows) == 0:
        return []
    table = rows.table[:, :4]
    recomputes = rows.of_kinds(Kind.C)
    if recomputes.any():  # by two levels is twice, too
        table = np.column_stack([table[:, :3], np.where(recomputes, 0, rows.part)])
    ops = np.ravel_multi_index(table.T, table.max(axis=0) + 1)  # one number each: sorted much sooner than rows
    _, first, count = np.unique(ops, return_index=True, return_counts=True)
    again = count > 1
    return [f"{rows.op(i)} stands {n} times" for i, n in zip(first[again][:MOST], count[again], strict=False)]


def _missing(problem: Problem, rows: Rows, index: Index) -> list[str]:
    """Each micro-batch passes each stage of its route: one F, and B and W, or BW. What else is there has all that makes
    it whole (`KindInfo.completed`); evicted is only what is neither offloaded nor recomputed."""
    costs = problem.costs
    passes = (costs.before[costs.route] != OFF_ROUTE).T  # (S, m)
    has = {kind: index.rows_of(kind) >= 0 for kind in (Kind.F, Kind.B, Kind.BW)}

    def name(wrong: Flags, text: str) -> list[str]:
        return [text.format(*(int(x) for x in place)) for place in np.argwhere(wrong)[:MOST]]

    complaints = [
        *name(passes & ~has[Kind.F], "{0}F{1} is missing"),
        *name(
            passes & ~has[Kind.B] & ~has[Kind.BW],
            "stage {0}, micro-batch {1} has no backward: {0}B{1} and {0}W{1}, or {0}BW{1}",
        ),
        *name(has[Kind.B] & has[Kind.BW], "{0}B{1} and {0}BW{1}: the backward is either split or fused"),
    ]
    for kind, of_kind in index.present.items():
        for others, why in KINDS[kind].completed:
            alone = of_kind[np.all([index.of_same_activation(other, of_kind) < 0 for other in others], axis=0)]
            for op in map(rows.op, alone[:MOST].tolist()):
                names = " or ".join(str(op._replace(kind=other)) for other in others)
                complaints.append(f"{op} has no {names}: {why}")
    if Kind.E in index.present:
        moved = (index.rows_of(Kind.C) >= 0) | (index.rows_of(Kind.O) >= 0)
        wrong = (index.rows_of(Kind.E) >= 0) & moved
        complaints += name(wrong, "{0}E{1}: an activation is offloaded, evicted or recomputed, one of them")
    return complaints


def _out_of_order(rows: Rows, index: Index) -> list[str]:
    """In a program an op stands behind what it runs after (`KindInfo`)."""
    wrong = []
    for kind, of_kind in index.present.items():
        for before in (*KINDS[kind].needs, *KINDS[kind].restored):
            first = index.of_same_activation(before, of_kind)
            swapped = (first > of_kind) & (rows.device[first] == rows.device[of_kind])
            wrong += [
                f"{rows.op(a)} stands after {rows.op(b)}"
                for a, b in zip(first[swapped][:MOST].tolist(), of_kind[swapped].tolist(), strict=False)
            ]
    return wrong


def _out_of_fixed_order(problem: Problem, rows: Rows, index: Index) -> list[str]:
    """Where the problem fixes the order of micro-batches, the forwards of a route's first stage stand in it."""
    if not problem.fixed_order:
        return []
    costs, forwards = problem.costs, index.rows_of(Kind.F)
    wrong = []
    for r, route in enumerate(problem.all_routes):
        entering = forwards[route[0], costs.route == r]
        wrong += [
            f"{rows.op(later)} stands before {rows.op(sooner)}: the problem has fixed_order"
            for sooner, later in pairwise(entering.tolist())
            if 0 <= later < sooner
        ]
    return wrong[:MOST]


def _bad_pairs(rows: Rows) -> list[str]:
    wrong = []
    for row in rows.first.tolist():
        ops = rows.op(row), rows.op(row + 1)
        forwards, backwards = (sum(op.kind in kinds for op in ops) for kinds in ((Kind.F,), BACKWARD))
        if (forwards, backwards) != (1, 1) or ops[0].microbatch == ops[1].microbatch:
            wrong.append(f"{rows.item(row)}: only a forward and a backward of another micro-batch run together")
    return wrong[:MOST]
