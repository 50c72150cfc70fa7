"""What is wrong with programs, whatever the clock does: ops that are missing, doubled, or in the wrong order."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from optpipe.evaluate.rows import Index, Rows
from optpipe.model.arrays import OFF_ROUTE, Flags
from optpipe.model.ops import BACKWARD, OPTIMIZER, Kind
from optpipe.model.problem import Problem
from optpipe.model.program import Program

MOST = 20  # sentences of one sort; a broken schedule of 200,000 ops is not listed in full


def complaints(problem: Problem, links: Mapping[str, Program], rows: Rows, index: Index) -> list[str]:
    """Everything that is wrong with the programs, one sentence each, for rows that the problem knows."""
    return [
        *_twice(rows),
        *_missing(problem, index),
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


def _missing(problem: Problem, index: Index) -> list[str]:
    """Each micro-batch passes each stage of its route: one F, and B and W, or BW. O, D and R all or none; E, D, L, A
    and V all or none; evicted is only what is neither offloaded nor recomputed."""
    costs = problem.costs
    passes = (costs.before[costs.route] != OFF_ROUTE).T  # (S, m)
    has = {kind: index.rows_of(kind) >= 0 for kind in Kind}
    offload, drop, reload = (index.parts(kind) >= 0 for kind in (Kind.O, Kind.D, Kind.R))
    left = offload.copy()
    left[:, :, 0] |= has[Kind.E]
    evicted, updated = has[Kind.E], np.any([has[kind] for kind in OPTIMIZER], axis=0)

    def name(found: Flags, text: str) -> list[str]:
        return [text.format(*(int(x) for x in place)) for place in np.argwhere(found)[:MOST]]

    return [
        *name(passes & ~has[Kind.F], "{0}F{1} is missing"),
        *name(
            passes & ~has[Kind.B] & ~has[Kind.BW],
            "stage {0}, micro-batch {1} has no backward: {0}B{1} and {0}W{1}, or {0}BW{1}",
        ),
        *name(has[Kind.B] & has[Kind.BW], "{0}B{1} and {0}BW{1}: the backward is either split or fused"),
        *name(has[Kind.B] & ~has[Kind.W], "{0}B{1} has no {0}W{1}"),
        *name(has[Kind.W] & ~has[Kind.B], "{0}W{1} has no {0}B{1}"),
        *name(offload & ~drop, "{0}O{1}.{2} has no drop: its device copy is never let go"),
        *name(offload & ~reload, "{0}O{1}.{2} has no reload: the backward misses its bytes"),
        *name(drop & ~left, "{0}D{1}.{2} has no offload or eviction before it"),
        *name(reload & ~offload, "{0}R{1}.{2} has no offload before it"),
        *name(evicted & ~drop[:, :, 0], "{0}E{1} has no {0}D{1}: its device copy is never let go"),
        *name(evicted & ~has[Kind.L], "{0}E{1} has no {0}L{1}: the backward misses its bytes"),
        *name(evicted & ~has[Kind.A], "{0}E{1} has no {0}A{1} on the peer: nothing makes room for it there"),
        *name(has[Kind.A] & ~has[Kind.V], "{0}A{1} has no {0}V{1}: its room is never let go"),
        *(
            text
            for kind in "LAV"
            for text in name(has[Kind[kind]] & ~evicted, f"{{0}}{kind}{{1}} has no {{0}}E{{1}}: nothing is evicted")
        ),
        *name(
            evicted & (has[Kind.C] | offload.any(axis=2)),
            "{0}E{1}: an activation is offloaded, evicted or recomputed, one of them",
        ),
        *(
            text
            for kind in OPTIMIZER
            for text in name(
                updated & ~has[kind], f"{{0}}{kind.name}0 is missing: an optimizer on the host is G, U and P"
            )
        ),
    ]


def _out_of_order(rows: Rows, index: Index) -> list[str]:
    """In each program F stands before O, E, D, R, L, C and these before B, R before C, B before W; on the peer A
    before V. Of an optimizer on the host, P before all F of its stage, G after all its gradients, U after G."""
    at = {kind: index.rows_of(kind) for kind in Kind}
    forward, backward = at[Kind.F], index.rows_of(Kind.B, Kind.BW)
    offload, drop, reload = (index.parts(kind) for kind in (Kind.O, Kind.D, Kind.R))
    steps = [
        (forward, at[Kind.C]),
        (forward, backward),
        *((at[kind], backward) for kind in (Kind.R, Kind.C, Kind.L)),
        (at[Kind.R], at[Kind.C]),
        (backward, at[Kind.W]),
        (np.broadcast_to(forward[:, :, None], offload.shape), offload),
        (offload, drop),
        (drop, reload),
        (forward, at[Kind.E]),
        (at[Kind.E], drop[:, :, 0]),
        (drop[:, :, 0], at[Kind.L]),
        (at[Kind.A], at[Kind.V]),
        (np.broadcast_to(at[Kind.P][:, :1], forward.shape), forward),
        *((at[kind], np.broadcast_to(at[Kind.G][:, :1], forward.shape)) for kind in (Kind.W, Kind.BW)),
        (at[Kind.G], at[Kind.U]),
    ]
    wrong = []
    for first, second in steps:
        swapped = (first >= 0) & (second >= 0) & (first > second)
        wrong += [
            f"{rows.op(a)} stands after {rows.op(b)}"
            for a, b in zip(first[swapped][:MOST], second[swapped], strict=False)
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
