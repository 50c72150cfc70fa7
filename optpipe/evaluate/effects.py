"""The memory rule: what each kind of op takes when it starts and frees when it ends, on its device and on the host.

`TABLE`, of `optpipe.model.ops.KINDS`, is the only place that says it. The certificate is a prefix scan over it; list
scheduling, CP-SAT, the MILP, repair, bounds and the runtime's lowering read the same table.

What an op takes counts from its start, what it frees counts until its end. So no jitter of any op or transfer leads to
more bytes than the scan over the programs finds. G, U and P have no effect: what they move is model state, which is
not part of `activation_budget_bytes`.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from optpipe.evaluate.rows import Index, Rows
from optpipe.model.arrays import NONE, Ints
from optpipe.model.costs import stored_width
from optpipe.model.ops import KINDS, ActivationSizes, Kind, nothing
from optpipe.model.problem import Problem

TABLE = {kind: info.effect for kind, info in KINDS.items()}


class Holding(NamedTuple):
    """What one activation holds from the start or the end of an op on."""

    kind: Kind
    ended: bool  # from the op's end on, else from its start on
    bytes: int


class RowEffects(NamedTuple):
    """What each op of a schedule takes and frees, (n,) bytes each; the fields of `Effect`."""

    takes: Ints
    frees: Ints
    takes_on_host: Ints
    frees_on_host: Ints


class Effects:
    """The table in one problem's bytes, for whole activations: arrays by kind, stage and micro-batch.

    For an activation that stays on its device until its backward `takes` and `frees` are all there is. For one that is
    recomputed `by_level` says what F and C do instead. Transfers take and free the bytes of their part (`parts`,
    `parts_by_level`).
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        costs = problem.costs
        self.takes, self.frees = self._by_kind(kept=costs.activation)

    def _by_kind(self, kept: Ints) -> tuple[Ints, Ints]:
        costs = self.problem.costs
        arrays = costs.activation, costs.saved_for_weight, kept
        width = max(map(stored_width, arrays))  # equal micro-batches are computed once
        activation, saved, kept = (array[:, :width] for array in arrays)
        none = np.zeros_like(kept)
        sizes = ActivationSizes(activation, saved, kept, moved=none, hosted=none)
        shape = len(Kind), *costs.activation.shape
        takes = np.array([TABLE[kind].takes(sizes) for kind in Kind])
        frees = np.array([TABLE[kind].frees(sizes) for kind in Kind])
        return np.broadcast_to(takes, shape), np.broadcast_to(frees, shape)

    @cached_property
    def by_level(self) -> list[tuple[Ints, Ints]]:
        """By level: (len(Kind), S, m) what ops take and free where the activation is recomputed by it."""
        return [self._by_kind(kept) for kept in self.problem.costs.levels.checkpoint]

    @cached_property
    def parts(self) -> Ints:
        """(S, m, parts) the bytes of each part of an activation that can leave; 0 beyond a stage's number of parts."""
        return self._parts(self.problem.costs.offload, NONE)

    @cached_property
    def parts_by_level(self) -> list[Ints]:
        """By level: (S, m, parts) the bytes of each part of its checkpoint that can leave."""
        return [self._parts(offload, level) for level, offload in enumerate(self.problem.costs.levels.offload)]

    def _parts(self, offload: Ints, level: int) -> Ints:
        costs = self.problem.costs
        stage, j, part = np.ogrid[: len(costs.parts), : stored_width(offload), : costs.parts.max()]
        nbytes = np.where(part < costs.parts[stage], costs.part_bytes(stage, j, part, level), 0)
        return np.broadcast_to(nbytes, (*offload.shape, nbytes.shape[2]))

    def holdings(self, stage: int, microbatch: int, *kinds: Kind, level: int = NONE) -> list[Holding]:
        """What an activation holds while these ops of it run one after the other, such as F, B, W or F, C, BW.

        One entry for each start and end at which that changes; parts that leave in between come off it. `level` is that
        by which it is recomputed.
        """
        takes, frees = self.by_level[level] if level >= 0 else (self.takes, self.frees)
        holdings: list[Holding] = []
        held = 0
        for kind in kinds:
            for ended, change in (
                (False, int(takes[kind, stage, microbatch])),
                (True, -int(frees[kind, stage, microbatch])),
            ):
                if change:
                    held += change
                    holdings.append(Holding(kind, ended, held))
        return holdings

    def by_row(self, rows: Rows, index: Index) -> RowEffects:
        """What each op takes at its start and frees at its end, (n,) bytes each. Those of a pair stand on its first
        op."""
        sizes = self._sizes(rows, index)
        return RowEffects(*(self._by_row(rows, sizes, what) for what in RowEffects._fields))

    def _sizes(self, rows: Rows, index: Index) -> ActivationSizes:
        costs, stage, microbatch = self.problem.costs, rows.stage, rows.microbatch
        activation, saved = costs.activation[stage, microbatch], costs.saved_for_weight[stage, microbatch]
        kept = activation
        if costs.can_recompute.any():
            level, part = index.level[stage, microbatch], np.where(rows.of_kinds(Kind.C), 0, rows.part)
            moved = costs.part_bytes(stage, microbatch, part, level)
            kept = np.where(level >= 0, costs.levels.checkpoint[level, stage, microbatch], kept)
        else:
            moved = costs.part_bytes(stage, microbatch, rows.part)
        if costs.can_evict.any():
            evicted = rows.of_kinds(Kind.D) & (index.rows_of(Kind.E) >= 0)[stage, microbatch]
            moved = np.where(evicted | rows.of_kinds(Kind.L, Kind.A, Kind.V), costs.evict[stage, microbatch], moved)
        hosted = np.zeros((len(self.problem.stages), self.problem.microbatches), dtype=np.int64)
        leaving = np.flatnonzero(rows.of_kinds(Kind.O))
        np.add.at(hosted, (stage[leaving], microbatch[leaving]), moved[leaving])
        return ActivationSizes(activation, saved, kept, moved, hosted[stage, microbatch])

    def _by_row(self, rows: Rows, sizes: ActivationSizes, what: str) -> Ints:
        effects = {kind: getattr(effect, what) for kind, effect in TABLE.items()}
        kinds = [kind for kind, effect in effects.items() if effect is not nothing]
        amount: Ints = np.select([rows.kind == kind for kind in kinds], [effects[kind](sizes) for kind in kinds], 0)
        amount[rows.first] += amount[rows.first + 1]
        amount[rows.second] = 0
        return amount
