"""`certify`: the exact peak of device and host memory, by a prefix scan over each program (DESIGN: memory is a property
of the program).

In list order: F allocates `activation_bytes`; after B `saved_for_weight_bytes` of them stay (where that is more, B
allocates the rest); W frees what B left; BW frees all. O takes pinned host memory for its part until the backward of
that micro-batch; D frees the part's device bytes, R allocates them again. With C only `checkpoint_bytes` stay after F,
and C allocates the rest. Of what is evicted D frees `evict_bytes` and L allocates them again, while A takes as many on
the peer, before the eviction begins, and V frees them there, after the load has ended. What an op allocates counts from
its start, what it frees counts until its end, so no jitter of any op or transfer leads to more bytes than the scan
finds, on either device. G, U and P change nothing: what they keep on the host is model state, which
`activation_budget_bytes` has been freed of already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from optpipe.evaluate.graph import Ints, Table, Where, describe, flatten, require_known, second_of_pair
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.program import JOINED, KIND, MICROBATCH, PART, STAGE, Program, of_kinds

if TYPE_CHECKING:
    from optpipe.schedule import Schedule


@dataclass(frozen=True)
class Peak:
    """The most bytes that a device (or its host memory) holds, the op during which it does, and what it may hold (None:
    no limit)."""

    bytes: int
    at: str
    limit: int | None

    @property
    def fits(self) -> bool:
        return self.limit is None or self.bytes <= self.limit


@dataclass(frozen=True)
class Certificate:
    """Peaks by device."""

    device: tuple[Peak, ...]
    host: tuple[Peak, ...]

    @property
    def fits(self) -> bool:
        return not self.complaints()

    def complaints(self) -> list[str]:
        """A sentence for each device that needs more than it has."""
        return [
            f"device {d} needs {peak.bytes} bytes{of} during {peak.at} and has {peak.limit}"
            for of, peaks in (("", self.device), (" of host memory", self.host))
            for d, peak in enumerate(peaks)
            if not peak.fits
        ]


def certify(problem: Problem, schedule: Schedule) -> Certificate:
    """The memory that the schedule needs, whatever the clock does; raises `ScheduleError` where the programs are not of
    this problem."""
    table, device = flatten(schedule)
    require_known(problem, table, device)
    taken, freed = device_bytes(problem, table)
    host_taken, host_freed = host_bytes(problem, table)
    limits = [(d.activation_budget_bytes, d.host_memory_bytes) for d in problem.devices]
    begins = np.searchsorted(device, np.arange(len(limits) + 1))
    on_device, on_host = [], []
    for d, (memory, host_memory) in enumerate(limits):
        own = slice(begins[d], begins[d + 1])
        on_device.append(_peak(table[own], taken[own], freed[own], memory))
        on_host.append(_peak(table[own], host_taken[own], host_freed[own], host_memory))
    return Certificate(tuple(on_device), tuple(on_host))


def held_bytes(problem: Problem, program: Program) -> tuple[Ints, Ints]:
    """The bytes that the program's device holds during each op and after it, (n,) each, for a program of this problem.
    A pair's ops may share their bytes in any way: the first has after it what the pair holds."""
    taken, freed = device_bytes(problem, program.table)
    during = _during(taken, freed)
    after = during - freed
    first = np.flatnonzero(program.table[:, JOINED] == 1)
    after[first] = during[first + 1] = during[first]
    return during, after


def device_bytes(problem: Problem, table: Table) -> tuple[Ints, Ints]:
    """Bytes that each op takes at its start and frees at its end; a pair's stand on its first op."""
    costs, kind, stage, microbatch = problem.costs, table[:, KIND], table[:, STAGE], table[:, MICROBATCH]
    activation, kept = costs.activation[stage], costs.saved_for_weight[stage]
    where = Where(problem, table)
    recomputed = (where.of(Kind.C) >= 0)[stage, microbatch]
    moved = costs.part_bytes(stage, table[:, PART])
    if costs.can_evict.any():
        moved = np.where((where.of(Kind.E) >= 0)[stage, microbatch], costs.evict[stage], moved)
    regained = activation - costs.checkpoint[stage]
    taken = np.select(
        [kind == Kind.F, kind == Kind.B, kind == Kind.C, of_kinds(table, Kind.R, Kind.L), kind == Kind.A],
        [activation, np.maximum(0, kept - activation), regained, moved, costs.evict[stage]],
        0,
    )
    freed = np.select(
        [
            (kind == Kind.F) & recomputed,
            kind == Kind.B,
            kind == Kind.W,
            kind == Kind.BW,
            kind == Kind.D,
            kind == Kind.V,
        ],
        [regained, np.maximum(0, activation - kept), kept, activation, moved, costs.evict[stage]],
        0,
    )
    return _together(table, taken), _together(table, freed)


def host_bytes(problem: Problem, table: Table) -> tuple[Ints, Ints]:
    """Pinned host bytes that each op takes and frees: from O to the backward after its reload."""
    kind, stage, microbatch = table[:, KIND], table[:, STAGE], table[:, MICROBATCH]
    taken = np.where(kind == Kind.O, problem.costs.part_bytes(stage, table[:, PART]), 0)
    held = np.zeros((len(problem.stages), problem.microbatches), dtype=np.int64)
    np.add.at(held, (stage, microbatch), taken)
    freed = np.where(of_kinds(table, Kind.B, Kind.BW), held[stage, microbatch], 0)
    return _together(table, taken), _together(table, freed)


def _together(table: Table, amount: Ints) -> Ints:
    first = np.flatnonzero(table[:, JOINED] == 1)
    amount[first] += amount[first + 1]
    amount[second_of_pair(table)] = 0
    return amount


def _peak(table: Table, taken: Ints, freed: Ints, limit: int | None) -> Peak:
    if len(table) == 0:
        return Peak(0, "no op", limit)
    during = _during(taken, freed)
    i = int(np.argmax(during))
    return Peak(int(during[i]), describe(table[i]), limit)


def _during(taken: Ints, freed: Ints) -> Ints:
    """The prefix scan: what an op takes counts from its start, what it frees until its end."""
    during: Ints = np.cumsum(taken) - np.cumsum(freed) + freed
    return during
