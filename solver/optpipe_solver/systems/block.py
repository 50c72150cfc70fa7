"""Schedules that repeat a building block (Qi et al. 2024, Pipeline Parallelism with Controllable Memory).

A block says in which slot, counted from a micro-batch's launch, each stage runs its F, B and W. A schedule is the block
once for each micro-batch, squeezed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from optpipe.model.arrays import Floats, Table
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.program import KIND, MICROBATCH, STAGE
from optpipe.schedule import Schedule
from optpipe_solver.systems.system import by_slot


@dataclass(frozen=True)
class Block:
    """The slots, by stage, in which one micro-batch's F, B and W start, counted from its launch."""

    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float] | None = None  # None: B and W are fused

    @property
    def passes(self) -> list[tuple[Kind, Sequence[float]]]:
        """Each kind of op, and its slots by stage."""
        if self.weight is None:
            return [(Kind.F, self.forward), (Kind.BW, self.backward)]
        return [(Kind.F, self.forward), (Kind.B, self.backward), (Kind.W, self.weight)]


def repeat(problem: Problem, block: Block, launches: Sequence[float]) -> Schedule:
    """Repeat the block for each micro-batch j, from slot launches[j] on.

    A device's ops are in the order of the slots, and each runs as soon as it can (squeezed, as the paper has it); of
    two in one slot the later one waits.
    """
    return by_slot(problem, *slots(block, launches))


def slots(block: Block, launches: Sequence[float]) -> tuple[Table, Floats]:
    """Return rows of a program's table, by kind, stage and micro-batch, and the slot in which each op starts."""
    kinds, starts = zip(*block.passes, strict=True)
    slot = np.add.outer(np.array(starts, dtype=np.float64), launches)
    table = np.zeros((*slot.shape, 5), dtype=np.int32)
    table[..., KIND] = np.array(kinds)[:, None, None]
    _, table[..., STAGE], table[..., MICROBATCH] = np.indices(slot.shape)
    return table.reshape(-1, 5), slot.ravel()


def with_weights(problem: Problem, block: Block, interval: int) -> Block:
    """Put each W in the first slot after its B that is free when the block is repeated every `interval` slots.

    Slots are whole, and every op lasts one.
    """
    weight = [0.0] * len(problem.stages)
    for d in range(len(problem.devices)):
        stages = problem.stages_on(d)
        taken = {starts[s] % interval for starts in (block.forward, block.backward) for s in stages}
        for s in sorted(stages, key=block.backward.__getitem__):
            weight[s] = next(
                slot for slot in (block.backward[s] + k for k in range(1, interval)) if slot % interval not in taken
            )
            taken.add(weight[s] % interval)
    return replace(block, weight=weight)


def reordered(problem: Problem, table: Table, slot: Floats, *, wholly: bool = False) -> Floats:
    """Return the slots after the paper's reordering: it fills bubbles of warm-up and cool-down within the same peak.

    In the order of their slots, ops move to the first slot of their device that is free after what they need; an F
    only as far as no device then holds more activations, each from its F to its W, than the fullest did. From the first
    B of stage 0 to its last F the pipeline is full: there no op overtakes another, unless all is reordered `wholly`, as
    the block's own order mostly suits other times better. Behind a device's last F nothing is allocated: there weight
    gradients take what slots input gradients, for which other devices wait, leave.

    Stages are one row, backwards are split, slots are whole, every op lasts one.
    """
    kind, stage, microbatch = table[:, [KIND, STAGE, MICROBATCH]].T
    device, at = problem.costs.device[stage], slot.astype(np.int64)
    forward, weight = kind == Kind.F, kind == Kind.W
    end = int(at.max()) + 2
    last = np.zeros(len(problem.devices), dtype=np.int64)
    changes = np.zeros((len(problem.devices), end), dtype=np.int64)
    np.maximum.at(last, device[forward], at[forward])
    np.add.at(changes, (device[forward], at[forward]), 1)
    np.add.at(changes, (device[weight], at[weight] + 1), -1)
    held = changes.cumsum(axis=1)
    most = held.max()
    filled = int(at[(kind == Kind.B) & (stage == 0)].min())
    full = range(filled, filled if wholly else int(at[forward & (stage == 0)].max()) + 1)

    waits = weight & (at > last[device])
    taken = [bytearray(end) for _ in problem.devices]
    for d, was in zip(device[~waits].tolist(), at[~waits].tolist(), strict=True):
        taken[d][was] = True
    by_time = np.lexsort((microbatch, stage, kind, at, waits))
    # The row of the op that each waits for, besides those of its own device; -1 if there is none.
    row_of = np.full((len(Kind), len(problem.stages) + 1, problem.microbatches), -1)
    row_of[kind, stage, microbatch] = np.arange(len(table))
    row_of[Kind.B, -1] = row_of[Kind.F, -2]  # after the last stage comes its own forward
    input_gradient = row_of[Kind.B, stage + (kind == Kind.B), microbatch]
    before = np.where(kind == Kind.F, row_of[Kind.F, stage - 1, microbatch], input_gradient)
    columns = (by_time, *(column[by_time] for column in (kind, device, at, waits, before)))
    moved = [-1] * (len(table) + 1)  # the last entry is for no op: nothing to wait for
    reached = [0] * len(problem.devices)  # the slot after the last op that has moved
    for row, k, d, was, later, needs in zip(*(column.tolist() for column in columns), strict=True):
        to = moved[needs] + 1
        if was in full:
            to = max(to, reached[d])
        if k == Kind.F and to < was:
            too_much = (held[d, to:was] == most).nonzero()[0]
            to += int(too_much[-1]) + 1 if len(too_much) else 0
        if not later:
            taken[d][was] = False
        to = moved[row] = taken[d].index(False, to)
        taken[d][to] = True
        reached[d] = max(reached[d], to + 1)
        if k == Kind.F:
            held[d, to:was] += 1
        elif k == Kind.W:
            held[d, to + 1 : was + 1] -= 1
    return np.array(moved[:-1], dtype=np.float64)
