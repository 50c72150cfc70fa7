"""The rows of memory, Eq. 9 and 14 to 17: one function for each family.

Memory follows the program: what comes before an op in its list counts, whatever the clock shows. That takes two
variables more than the paper has: `reload_allocation`, and `away_at_reload` for the memory at such a moment. Only where
something is allocated is there a row. What ops take and free is read from `optpipe.evaluate.effects`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import gcd

import numpy as np

from optpipe.evaluate.effects import Effects
from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe_solver.milp.rows import FALSE, TRUE, Literal, Rows, linear_form
from optpipe_solver.milp.variables import COMPUTE, Activation, Variables, compute_ops

MIB = 2**20
LEAK = 1e-7  # of a row's coefficients: more than tolerances of the row and of its binaries let through

Term = tuple[int, Literal]  # a size, and whether it counts


@dataclass(frozen=True)
class Units:
    """Bytes counted in units: the greatest common divisor of all sizes where rows in it hold exactly, in spite of
    solvers' tolerances; else MiB.

    What an activation holds from one op to the next is rounded on its own, up for schedules, with `down` down for
    bounds; limits are rounded down. So rounded up, what fits in units fits in bytes. Rounded down, what fits in bytes
    fits in units: sums of rounded sizes are no larger than the limit, and whole.
    """

    problem: Problem
    down: bool = False

    @cached_property
    def unit(self) -> int:
        total = sum(int(self._effects.takes[op[:3]]) for op in compute_ops(self.problem))
        return self._common if total * LEAK < self._common else MIB

    @property
    def lossless(self) -> bool:
        """Whether no size is rounded."""
        return self._common % self.unit == 0

    @cached_property
    def _effects(self) -> Effects:
        return Effects(self.problem)

    @cached_property
    def _common(self) -> int:
        costs, effects = self.problem.costs, self._effects
        leaving = costs.offload[costs.can_offload]
        of_compute = (table[list(COMPUTE)].ravel() for table in (effects.takes, effects.frees))
        return max(1, gcd(*(int(size) for sizes in (leaving.ravel(), *of_compute) for size in np.unique(sizes))))

    def round(self, size: int) -> int:
        return size // self.unit if self.down else -(-size // self.unit)

    def takes_and_leaves(self, op: Op) -> tuple[int, int]:
        """What an F, B or W takes at its start, and Δ, what it leaves more than it found; it may be negative."""
        effects, held, before = self._effects, 0, 0
        for kind in COMPUTE:
            before, during = held, held + int(effects.takes[kind, op.stage, op.microbatch])
            held = during - int(effects.frees[kind, op.stage, op.microbatch])
            if kind == op.kind:
                break
        return self.round(during) - self.round(before), self.round(held) - self.round(before)

    def offloaded(self, a: Activation) -> int:
        """Γ: what the activation holds less while it is away."""
        held = int(self._effects.takes[Kind.F, *a] - self._effects.frees[Kind.F, *a])
        return self.round(held) - self.round(held - int(self.problem.costs.offload[a]))


@dataclass(frozen=True)
class _DeviceMemory:
    """What takes part in the memory of one device, in units.

    Attributes
    ----------
    ops
        Its compute ops, by their numbers.
    leaving
        Its activations that can leave, with Γ.
    limit
        Of what its activations hold.
    takes, leaves
        By op of any device, as `Units.takes_and_leaves`.
    """

    ops: list[int]
    leaving: dict[Activation, int]
    limit: int
    takes: list[int]
    leaves: list[int]


def activation_budget(v: Variables, units: Units) -> None:
    """All rows of memory, for each device that could hold too much."""
    takes, leaves = map(list, zip(*map(units.takes_and_leaves, v.paths.ops), strict=True))
    for d, device in enumerate(v.problem.devices):
        ops = np.flatnonzero(v.paths.device == d).tolist()
        leaving = {a: units.offloaded(a) for a in v.activations if v.costs.device[a[0]] == d}
        memory = _DeviceMemory(ops, leaving, device.activation_budget_bytes // units.unit, takes, leaves)
        if sum(takes[x] for x in ops) > memory.limit:
            v.create_away_literals(ops, list(leaving), takes)
            _drop_after_offload(v, memory)
            _reload_before_or_after_op(v, memory)
            _away_only_between_forward_and_backward(v, memory)
            _memory_of_ops(v, memory)
            _memory_of_reloads(v, memory)


def _drop_after_offload(v: Variables, memory: _DeviceMemory) -> None:
    """Eq. 14: an op that a drop comes before starts when the offload has ended."""
    for a, y in product(memory.leaving, memory.ops):
        if drops := v.drop_before.get((a, y)):
            span = v.transfer_span(Kind.O, a)
            v.rows.add_follows(v.end[y], v.offload_start[a], float(v.paths.time[y]), span, when=(drops,))


def _reload_before_or_after_op(v: Variables, memory: _DeviceMemory) -> None:
    """Eq. 15 and 16: a reload allocates before an op, or after it."""
    for a, y in product(memory.leaving, memory.ops):
        if returns := v.return_before.get((a, y)):
            v.rows.add_follows(v.end[y], v.reload_allocation[a], float(v.paths.time[y]), when=(returns,))
            v.rows.add_follows(v.reload_allocation[a], v.end[y], when=(v.offloaded[a], ~returns))


def _away_only_between_forward_and_backward(v: Variables, memory: _DeviceMemory) -> None:
    """Eq. 17: no drop and no reload comes before anything unless a leaves. Besides, a drop comes after F and before the
    reload, the reload before B, and what comes before an op comes before the next one."""
    for a, y in product(memory.leaving, memory.ops):
        if returns := v.return_before.get((a, y)):
            after_forward, after_backward = v.op_before[v.number(Kind.F, a), y], v.op_before[v.number(Kind.B, a), y]
            v.rows.add_clause(~returns, v.offloaded[a])
            v.rows.add_clause(~returns, after_forward)
            v.rows.add_clause(~v.offloaded[a], returns, ~after_backward)
            if drops := v.drop_before.get((a, y)):
                v.rows.add_clause(~drops, v.offloaded[a])
                v.rows.add_clause(~returns, drops)
                v.rows.add_clause(~drops, after_forward)
    for a, before_op in product(memory.leaving, (v.drop_before, v.return_before)):
        for x, y, _ in v.paths.arcs:
            if (a, x) in before_op and (a, y) in before_op:
                v.rows.add_clause(~before_op[a, x], before_op[a, y])


def _memory_of_ops(v: Variables, memory: _DeviceMemory) -> None:
    """Eq. 9: the memory during every op y that takes some: what y takes at its start, and what the others leave."""
    for y in memory.ops:
        if memory.takes[y]:
            held = [(memory.leaves[x], v.op_before[x, y]) for x in memory.ops if x != y]
            for a, size in memory.leaving.items():
                if (a, y) in v.drop_before:
                    held += [(-size, v.drop_before[a, y]), (size, v.return_before[a, y])]
            sizes_fit(v.rows, held, memory.limit - memory.takes[y])


def _memory_of_reloads(v: Variables, memory: _DeviceMemory) -> None:
    """Eq. 9 where a reload allocates: between two compute ops, after some drops and before others. Not of the paper.

    Without it a reload could take the bytes that an offload, still under way, frees just in time for the next op.
    """
    for b in memory.leaving:
        held = [(memory.leaves[x], literal) for x in memory.ops if (literal := _runs_before_reload(v, x, b)) != FALSE]
        most = sum(size if literal == TRUE else max(0, size) for size, literal in held)
        if most > memory.limit:
            held += _away_at_reload(v, memory, b)
            sizes_fit(v.rows, [*held, (most - memory.limit, v.offloaded[b])], most)


def _runs_before_reload(v: Variables, x: int, b: Activation) -> Literal:
    """Whether op x runs before the reload of b allocates."""
    if (b, x) in v.return_before:
        return ~v.return_before[b, x]
    F = v.number(Kind.F, b)
    return TRUE if x == F or v.paths.precedes(x, F) else FALSE


def _away_at_reload(v: Variables, memory: _DeviceMemory, b: Activation) -> list[Term]:
    """What is away when the reload of b allocates: c if its drop comes before that and its reload after."""
    away: list[Term] = []
    for c, size in memory.leaving.items():
        if c != b and not (v.keep_order(c, b) or v.is_over_before(c, b) or v.is_over_before(b, c)):
            is_away = v.away_at_reload[c, b] = v.rows.new_literal()
            v.rows.add_clause(~is_away, v.offloaded[c])
            v.rows.add_clause(~is_away, v.reload_before[b, c])
            v.rows.add_clause(~is_away, ~v.return_before.get((b, v.number(Kind.F, c)), FALSE))
            span = v.transfer_span(Kind.O, c)
            v.rows.add_follows(v.reload_allocation[b], v.offload_start[c], span=span, when=(is_away,))
            away.append((-size, is_away))
    return away


def sizes_fit(rows: Rows, sizes: Iterable[Term], limit: int) -> None:
    """Adds: the sizes of the literals that hold add up to `limit` at most. Sizes may be negative: then the literal's
    negation counts."""
    row, at_least = linear_form((), ((-size, literal) for size, literal in sizes), -limit)
    terms = [(abs(int(size)), Literal(var, size < 0)) for var, size in row.items()]
    room = int(-at_least) + sum(size for size, literal in terms if not literal.positive)
    if room < 0:
        rows.add((), (), 1.0)  # nothing fits
        return
    for size, literal in terms:
        if size > room:
            rows.add_clause(~literal)
    terms = [(size, literal) for size, literal in terms if size <= room]
    if sum(size for size, _ in terms) > room:
        unit = gcd(*(size for size, _ in terms))
        rows.add((), [(-float(size // unit), literal) for size, literal in terms], -float(room // unit))
