"""The rows of memory, Eq. 9 and 14 to 17: one function for each family.

Memory follows the program: what comes before an op in its list counts, whatever the clock says. That takes two things
more than the paper has: `A`, the moment at which a reload allocates, and `X`, for the memory at such a moment. Only
where something is allocated is there a row. What ops take and free is read from `optpipe.evaluate.effects`.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from optpipe.evaluate.effects import Effects
from optpipe.model.ops import Kind, Op
from optpipe_solver.milp.capacity import add_capacity
from optpipe_solver.milp.rows import FALSE, TRUE, Literal
from optpipe_solver.milp.schedule_graph import Activation
from optpipe_solver.milp.variables import Variables


def add_memory_capacity(v: Variables) -> None:
    """All rows of memory, for each device that could hold too much."""
    takes, leaves = _takes_and_leaves(v)
    for d, device in enumerate(v.problem.devices):
        ops = [x for x in range(len(v.paths.ops)) if v.paths.device[x] == d]
        leaving = [a for a in v.activations if v.costs.device[a[0]] == d]
        held = v.around.held[d] if v.around else 0
        limit = device.activation_budget_bytes - held
        if sum(takes[x] for x in ops) > limit or (v.around and leaving):
            v.new_away_literals(ops, leaving, [size > 0 for size in takes])
            _add_drops(v, leaving)
            _add_reloads(v, leaving)
            _add_consistency(v, leaving)
            _add_memory_of_ops(v, ops, leaving, limit, takes, leaves)
            _add_memory_of_reloads(v, ops, leaving, limit, leaves)


def _takes_and_leaves(v: Variables) -> tuple[list[int], list[int]]:
    """By op the bytes that it allocates at its start, and Δ: those that it leaves more than it found. As printed Δ of B
    is negative; it need not be."""
    effects = Effects(v.problem)
    ops = tuple(np.array([(op.kind, op.stage) for op in v.paths.ops]).T)
    return effects.takes[ops].tolist(), (effects.takes - effects.frees)[ops].tolist()


def _add_drops(v: Variables, leaving: list[Activation]) -> None:
    """Eq. 14: an op that a drop comes before starts when the offload has ended. As printed, y's start is E - T_comm; it
    can only be E - T of y itself."""
    for (a, y), M in v.M.items():
        if a in leaving:
            v.add_follows((v.E[y], 0.0), v.O[a], float(v.paths.time[y]), v.transfer_span(Kind.O, a), when=(M,))


def _add_reloads(v: Variables, leaving: list[Activation]) -> None:
    """Eq. 15 and 16, for the moment A at which the reload allocates: before y, or after it."""
    for (a, y), N in v.N.items():
        if a in leaving:
            if v.A[a][0] != v.C:  # a reload after the window comes before y only if y is there, too
                v.add_follows((v.E[y], 0.0), v.A[a], float(v.paths.time[y]), when=(N,))
            v.add_follows(v.A[a], (v.E[y], 0.0), when=(v.W[a], ~N))


def _add_consistency(v: Variables, leaving: list[Activation]) -> None:
    """Eq. 17: no drop and no reload comes before anything unless a leaves.

    Besides, what the paper leaves to Eq. 9 to find out: a drop comes after F and before the reload, the reload before
    B, and what comes before an op comes before the next one.
    """
    for (a, y), N in v.N.items():
        if a not in leaving:
            continue
        before = v.precedes(Op(Kind.F, *a), y)
        v.rows.clause(~N, v.W[a])
        v.rows.clause(~N, before)
        v.rows.clause(~v.W[a], N, ~v.precedes(Op(Kind.B, *a), y))
        if M := v.M.get((a, y)):
            v.rows.clause(~M, v.W[a])
            v.rows.clause(~N, M)
            v.rows.clause(~M, before)
    for a, order in product(leaving, (v.M, v.N)):
        for x, y, _ in v.paths.arcs:
            if (a, x) in order and (a, y) in order:
                v.rows.clause(~order[a, x], order[a, y])


def _add_memory_of_ops(
    v: Variables, ops: list[int], leaving: list[Activation], limit: int, takes: list[int], leaves: list[int]
) -> None:
    """Eq. 9: the memory during every op y that takes some. As printed it counts what y leaves, Δ, as what it needs;
    here it needs what it takes at its start, and the others count by what they leave."""
    for y in ops:
        if takes[y] and not (v.around and v.around.is_border(v.paths.ops[y])):
            held = [(leaves[x], v.P[x, y]) for x in ops if x != y]
            for a in leaving:
                if (a, y) in v.M:
                    size = int(v.costs.offload[a[0]])
                    held += [(-size, v.M[a, y]), (size, v.N[a, y])]
            add_capacity(v.rows, held, limit - takes[y])


def _add_memory_of_reloads(
    v: Variables, ops: list[int], leaving: list[Activation], limit: int, leaves: list[int]
) -> None:
    """Eq. 9 where a reload allocates: between two compute ops, after some drops and before others.

    The paper has no such row. Without it a reload could take the bytes that an offload, still under way, frees just in
    time for the next op. X: c is away when the reload of b allocates, its drop before that and its reload after.
    """
    for b in leaving:
        if v.around and v.around.transfers[b].A is not None:
            continue  # it allocates outside the window
        held: list[tuple[int, Literal]] = []
        most = 0
        for x in ops:
            after = v.N.get((b, x))
            literal = ~after if after else _is_before_forward(v, x, b)
            if literal != FALSE:
                held.append((leaves[x], literal))
                most += leaves[x] if literal == TRUE else max(0, leaves[x])
        if most <= limit:
            continue
        for c in leaving:
            if c != b and not (v.in_order(c, b) or v.is_over(c, b) or v.is_over(b, c)):
                X = v.X[c, b] = v.rows.literal()
                v.rows.clause(~X, v.W[c])
                v.rows.clause(~X, v.L[b, c])
                F = v.number(Kind.F, c)
                v.rows.clause(~X, ~v.N.get((b, F), FALSE) if F is not None else TRUE)
                v.add_follows(v.A[b], v.O[c], span=v.transfer_span(Kind.O, c), when=(X,))
                held.append((-int(v.costs.offload[c[0]]), X))
        add_capacity(v.rows, [*held, (most - limit, v.W[b])], most)


def _is_before_forward(v: Variables, x: int, a: Activation) -> Literal:
    """Whether x is, or is known to precede, the forward of a."""
    F = v.number(Kind.F, a)
    return TRUE if F is not None and (x == F or v.paths.precedes(x, F)) else FALSE
