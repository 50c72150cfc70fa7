"""The memory rule: what each kind of op takes when it starts and frees when it ends, on its device and on the host; and
the certificate: the exact peaks of memory, by a prefix scan over each program.

`TABLE`, of `optpipe.model.ops.KINDS`, is the only place of the rule. Certificate, list scheduling, CP-SAT, the MILP,
repair, bounds and the runtime's lowering read it.

What an op takes counts from its start, what it frees counts until its end. So no jitter of any op or transfer leads to
more bytes than the scan over the programs finds. G, U and P have no effect: what they move is model state, which is
not part of `activation_budget_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from optpipe.evaluate.rows import Index, Rows
from optpipe.model.arrays import NONE, UNLIMITED, Ints
from optpipe.model.costs import by_node, stored_width
from optpipe.model.ops import KINDS, ActivationSizes, Kind, nothing
from optpipe.model.problem import Problem
from optpipe.text import distinct_sizes

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
        self._costs = problem.costs
        self.takes, self.frees = self._by_kind(kept=self._costs.activation)

    def _by_kind(self, kept: Ints) -> tuple[Ints, Ints]:
        arrays = self._costs.activation, self._costs.saved_for_weight, kept
        width = max(map(stored_width, arrays))  # equal micro-batches are computed once
        activation, saved, kept = (array[:, :width] for array in arrays)
        none = np.zeros_like(kept)
        sizes = ActivationSizes(activation, saved, kept, moved=none, hosted=none)
        shape = len(Kind), *self._costs.activation.shape
        takes = np.array([TABLE[kind].takes(sizes) for kind in Kind])
        frees = np.array([TABLE[kind].frees(sizes) for kind in Kind])
        return np.broadcast_to(takes, shape), np.broadcast_to(frees, shape)

    @cached_property
    def by_level(self) -> list[tuple[Ints, Ints]]:
        """By level: (len(Kind), S, m) what ops take and free where the activation is recomputed by it."""
        return [self._by_kind(kept) for kept in self._costs.levels.checkpoint]

    @cached_property
    def parts(self) -> Ints:
        """(S, m, parts) the bytes of each part of an activation that can leave; 0 beyond a stage's number of parts."""
        return self._parts(self._costs.offload, NONE)

    @cached_property
    def parts_by_level(self) -> list[Ints]:
        """By level: (S, m, parts) the bytes of each part of its checkpoint that can leave."""
        return [self._parts(offload, level) for level, offload in enumerate(self._costs.levels.offload)]

    def _parts(self, offload: Ints, level: int) -> Ints:
        costs = self._costs
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
            for ended, change in ((False, takes[kind, stage, microbatch]), (True, -frees[kind, stage, microbatch])):
                if change:
                    held += int(change)
                    holdings.append(Holding(kind, ended, held))
        return holdings

    def by_row(self, rows: Rows, index: Index) -> RowEffects:
        """What each op takes and frees. What those of a pair do stands on its first op."""
        sizes = self._sizes(rows, index)

        def amounts(what: str) -> Ints:
            effects = {kind: getattr(effect, what) for kind, effect in TABLE.items()}
            kinds = [kind for kind, effect in effects.items() if effect is not nothing]
            amount: Ints = np.select([rows.kind == kind for kind in kinds], [effects[kind](sizes) for kind in kinds], 0)
            amount[rows.first] += amount[rows.first + 1]
            amount[rows.second] = 0
            return amount

        return RowEffects(*map(amounts, RowEffects._fields))

    def _sizes(self, rows: Rows, index: Index) -> ActivationSizes:
        costs, stage, microbatch = self._costs, rows.stage, rows.microbatch
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
        hosted = np.zeros(costs.activation.shape, dtype=np.int64)
        leaving = np.flatnonzero(rows.of_kinds(Kind.O))
        np.add.at(hosted, (stage[leaving], microbatch[leaving]), moved[leaving])
        return ActivationSizes(activation, saved, kept, moved, hosted[stage, microbatch])


def held_during(taken: Ints, freed: Ints, begins: Ints) -> Ints:
    """(n,) the prefix scan: the bytes held during each op, of (n,) bytes taken and freed in program order, where the
    program of each device begins at (D + 1,) `begins`."""
    held: Ints = np.cumsum(taken - freed)
    before = np.concatenate(([0], held))[begins[:-1]]  # what the programs above left
    held -= np.repeat(before, np.diff(begins))
    return held + freed


@dataclass(frozen=True, eq=False)
class Held:
    """The bytes that are held during each op and after it, (n,) each."""

    during: Ints
    after: Ints  # the ops of a pair may share their bytes in any way: the first has after it what the pair holds
    on_host: Ints  # during each op

    @classmethod
    def scan(cls, effects: RowEffects, rows: Rows, devices: int) -> Held:
        begins = rows.begins(devices)
        during = held_during(effects.takes, effects.frees, begins)
        after = during - effects.frees
        after[rows.first] = during[rows.first + 1] = during[rows.first]
        return cls(during, after, held_during(effects.takes_on_host, effects.frees_on_host, begins))


@dataclass(frozen=True)
class Peak:
    """The most bytes that a device, or its share of host memory, holds."""

    bytes: int
    at: str  # the op during which it does
    limit: int | None  # what it may hold; None where nothing limits it

    @property
    def fits(self) -> bool:
        return self.limit is None or self.bytes <= self.limit


@dataclass(frozen=True)
class Certificate:
    """The peaks of every device, by the order of its program alone.

    Attributes
    ----------
    device
        By device: the peak of its memory.
    host
        By device: that of the pinned host memory that it uses. Its limit is what the peaks of the other devices of its
        node leave: pinned memory stays with its device.
    """

    device: tuple[Peak, ...]
    host: tuple[Peak, ...]

    @classmethod
    def from_held(cls, problem: Problem, rows: Rows, held: Held) -> Certificate:
        begins = rows.begins(len(problem.devices)).tolist()

        def peak(during: Ints, d: int, limit: int | None) -> Peak:
            begin, end = begins[d : d + 2]
            if begin == end:
                return Peak(0, "no op", limit)
            row = begin + int(np.argmax(during[begin:end]))
            return Peak(int(during[row]), str(rows.op(row)), limit)

        costs, devices = problem.costs, range(len(problem.devices))
        pinned = np.array([peak(held.on_host, d, None).bytes for d in devices])
        left = np.maximum(0, costs.host_memory - by_node(costs.node, pinned) + pinned)
        hosts = zip(costs.host_memory.tolist(), left.tolist(), strict=True)
        return cls(
            tuple(peak(held.during, d, problem.devices[d].activation_budget_bytes) for d in devices),
            tuple(peak(held.on_host, d, limit if of < UNLIMITED else None) for d, (of, limit) in enumerate(hosts)),
        )

    @property
    def fits(self) -> bool:
        return not self.complaints()

    def complaints(self) -> list[str]:
        """A sentence for each device that needs more than it has."""
        return [
            f"device {d} needs {needed}{of} during {peak.at} and has {limit}"
            for of, peaks in (("", self.device), (" of host memory", self.host))
            for d, peak in enumerate(peaks)
            if not peak.fits
            for needed, limit in [distinct_sizes(peak.bytes, peak.limit or 0)]
        ]
