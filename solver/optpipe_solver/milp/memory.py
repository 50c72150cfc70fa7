"""The rows of memory, Eq. 9 and 14 to 17: one function for each family.

Memory follows the program: what comes before an op in its list counts, whatever the clock says. That takes two things
more than the paper has: `A`, the moment at which a reload allocates, and `X`, for the memory at such a moment. Only
where something is allocated is there a row. What ops take and free is read from `optpipe.evaluate.effects`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from optpipe.evaluate.effects import Effects
from optpipe.model.ops import Kind
from optpipe_solver.milp.capacity import Term, sizes_fit
from optpipe_solver.milp.rows import FALSE, TRUE, Literal
from optpipe_solver.milp.variables import Activation, Variables


@dataclass(frozen=True)
class _DeviceMemory:
    """What takes part in the memory of one device.

    Attributes
    ----------
    ops
        Its compute ops, by their numbers.
    leaving
        Its activations that can leave.
    limit
        Its bytes for activations.
    takes, leaves
        By op of any device: the bytes that it allocates at its start, and Δ, those that it leaves more than it found.
        As printed Δ of B is negative; it need not be.
    """

    ops: list[int]
    leaving: list[Activation]
    limit: int
    takes: list[int]
    leaves: list[int]


def activation_budget(v: Variables) -> None:
    """All rows of memory, for each device that could hold too much."""
    effects = Effects(v.problem)
    columns = tuple(np.array([(op.kind, op.stage, op.microbatch) for op in v.paths.ops]).T)
    takes, leaves = effects.takes[columns].tolist(), (effects.takes - effects.frees)[columns].tolist()
    for d, device in enumerate(v.problem.devices):
        ops = np.flatnonzero(v.paths.device == d).tolist()
        leaving = [a for a in v.activations if v.costs.device[a[0]] == d]
        memory = _DeviceMemory(ops, leaving, device.activation_budget_bytes, takes, leaves)
        if sum(takes[x] for x in ops) > memory.limit:
            v.create_away_literals(ops, leaving, takes)
            _drop_after_offload(v, memory)
            _reload_before_or_after_op(v, memory)
            _away_only_between_forward_and_backward(v, memory)
            _memory_of_ops(v, memory)
            _memory_of_reloads(v, memory)


def _drop_after_offload(v: Variables, memory: _DeviceMemory) -> None:
    """Eq. 14: an op that a drop comes before starts when the offload has ended. As printed, y's start is E - T_comm; it
    can only be E - T of y itself."""
    for a, y in product(memory.leaving, memory.ops):
        if M := v.M.get((a, y)):
            v.rows.add_follows(v.E[y], v.O[a], float(v.paths.time[y]), v.transfer_span(Kind.O, a), when=(M,))


def _reload_before_or_after_op(v: Variables, memory: _DeviceMemory) -> None:
    """Eq. 15 and 16, for the moment A at which the reload allocates: before y, or after it."""
    for a, y in product(memory.leaving, memory.ops):
        if N := v.N.get((a, y)):
            v.rows.add_follows(v.E[y], v.A[a], float(v.paths.time[y]), when=(N,))
            v.rows.add_follows(v.A[a], v.E[y], when=(v.W[a], ~N))


def _away_only_between_forward_and_backward(v: Variables, memory: _DeviceMemory) -> None:
    """Eq. 17: no drop and no reload comes before anything unless a leaves.

    Besides, what the paper leaves to Eq. 9 to find out: a drop comes after F and before the reload, the reload before
    B, and what comes before an op comes before the next one.
    """
    for a, y in product(memory.leaving, memory.ops):
        if N := v.N.get((a, y)):
            after_forward, after_backward = v.P[v.number(Kind.F, a), y], v.P[v.number(Kind.B, a), y]
            v.rows.add_clause(~N, v.W[a])
            v.rows.add_clause(~N, after_forward)
            v.rows.add_clause(~v.W[a], N, ~after_backward)
            if M := v.M.get((a, y)):
                v.rows.add_clause(~M, v.W[a])
                v.rows.add_clause(~N, M)
                v.rows.add_clause(~M, after_forward)
    for a, before_op in product(memory.leaving, (v.M, v.N)):
        for x, y, _ in v.paths.arcs:
            if (a, x) in before_op and (a, y) in before_op:
                v.rows.add_clause(~before_op[a, x], before_op[a, y])


def _memory_of_ops(v: Variables, memory: _DeviceMemory) -> None:
    """Eq. 9: the memory during every op y that takes some. As printed it counts what y leaves, Δ, as what it needs;
    here it needs what it takes at its start, and the others count by what they leave."""
    for y in memory.ops:
        if memory.takes[y]:
            held = [(memory.leaves[x], v.P[x, y]) for x in memory.ops if x != y]
            for a in memory.leaving:
                if (a, y) in v.M:
                    size = int(v.costs.offload[a])
                    held += [(-size, v.M[a, y]), (size, v.N[a, y])]
            sizes_fit(v.rows, held, memory.limit - memory.takes[y])


def _memory_of_reloads(v: Variables, memory: _DeviceMemory) -> None:
    """Eq. 9 where a reload allocates: between two compute ops, after some drops and before others.

    The paper has no such row. Without it a reload could take the bytes that an offload, still under way, frees just in
    time for the next op.
    """
    for b in memory.leaving:
        held = [(memory.leaves[x], literal) for x in memory.ops if (literal := _runs_before_reload(v, x, b)) != FALSE]
        most = sum(size if literal == TRUE else max(0, size) for size, literal in held)
        if most > memory.limit:
            held += _bytes_away_at_reload(v, memory, b)
            sizes_fit(v.rows, [*held, (most - memory.limit, v.W[b])], most)


def _runs_before_reload(v: Variables, x: int, b: Activation) -> Literal:
    """Whether op x runs before the reload of b allocates."""
    if (b, x) in v.N:
        return ~v.N[b, x]
    F = v.number(Kind.F, b)
    return TRUE if x == F or v.paths.precedes(x, F) else FALSE


def _bytes_away_at_reload(v: Variables, memory: _DeviceMemory, b: Activation) -> list[Term]:
    """X: c is away when the reload of b allocates, its drop before that and its reload after."""
    away: list[Term] = []
    for c in memory.leaving:
        if c != b and not (v.keep_order(c, b) or v.is_over_before(c, b) or v.is_over_before(b, c)):
            X = v.X[c, b] = v.rows.new_literal()
            v.rows.add_clause(~X, v.W[c])
            v.rows.add_clause(~X, v.L[b, c])
            v.rows.add_clause(~X, ~v.N.get((b, v.number(Kind.F, c)), FALSE))
            v.rows.add_follows(v.A[b], v.O[c], span=v.transfer_span(Kind.O, c), when=(X,))
            away.append((-int(v.costs.offload[c]), X))
    return away
