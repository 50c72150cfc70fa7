"""Schedules that repeat a building block (Qi et al. 2024, Pipeline Parallelism with Controllable Memory): a block says in which slot,
counted from a micro-batch's launch, each stage runs its F, B and W; a schedule is the block once for each micro-batch, squeezed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from optpipe.ops import Kind, Op
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe_solver.systems.order import by_slot


@dataclass(frozen=True)
class Block:
    """The slots, by stage, in which one micro-batch's F, B and W start, relative to its launch, and how many slots each of them lasts."""

    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float] | None = None  # None: B and W are fused
    lasts: tuple[float, float, float] = (1, 1, 1)  # F, B (or both fused), W

    @property
    def passes(self) -> list[tuple[Kind, Sequence[float], float]]:
        """Each kind of op with its slots by stage and how long it lasts."""
        f, b, w = self.lasts
        if self.weight is None:
            return [(Kind.F, self.forward, f), (Kind.BW, self.backward, b)]
        return [(Kind.F, self.forward, f), (Kind.B, self.backward, b), (Kind.W, self.weight, w)]


def repeat(problem: Problem, block: Block, launches: Sequence[float]) -> Schedule:
    """The block once for each micro-batch j, from slot launches[j] on: what a device runs is in the order of the slots, and its times are
    those of the problem, each op as soon as it can (squeezed, as the paper has it).

    Raises `ValueError` where two ops of a device take one slot: the block is wrong, or the launches are. Where such ops are to be moved
    instead, `by_slot(problem, slots(block, launches))` lets the later one wait.
    """
    placed = slots(block, launches)
    if found := collisions(problem, block, placed):
        raise ValueError(f"block: {found[0][0]} and {found[0][1]} collide in slot {placed[found[0][1]]}")
    return by_slot(problem, placed)


def slots(block: Block, launches: Sequence[float]) -> dict[Op, float]:
    """The slot in which each op starts."""
    return {
        Op(kind, s, j): launch + slot
        for kind, starts, _ in block.passes
        for s, slot in enumerate(starts)
        for j, launch in enumerate(launches)
    }


def collisions(problem: Problem, block: Block, placed: Mapping[Op, float]) -> list[tuple[Op, Op]]:
    """Ops next to each other on a device of which the second starts before the first has ended."""
    lasts = {kind: length for kind, _, length in block.passes}
    lists: list[list[Op]] = [[] for _ in problem.devices]
    for op in sorted(placed, key=placed.__getitem__):
        lists[problem.stages[op.stage].device].append(op)
    return [(a, b) for ops in lists for a, b in pairwise(ops) if placed[a] + lasts[a.kind] > placed[b]]


def with_weights(problem: Problem, block: Block, interval: int) -> Block:
    """The block with each W in the first slot behind its B that is free on its device when the block is repeated every `interval` slots.

    Slots are whole, and every op lasts one.
    """
    weight = [0.0] * len(problem.stages)
    for d in range(len(problem.devices)):
        stages = problem.stages_on(d)
        taken = {starts[s] % interval for starts in (block.forward, block.backward) for s in stages}
        for s in sorted(stages, key=block.backward.__getitem__):
            weight[s] = next(slot for slot in (block.backward[s] + k for k in range(1, interval)) if slot % interval not in taken)
            taken.add(weight[s] % interval)
    return replace(block, weight=weight)


def reordered(problem: Problem, placed: Mapping[Op, float]) -> dict[Op, int]:
    """The slots after the paper's reordering, which fills the bubbles of warm-up and cool-down and holds no more than before.

    In the order of their slots, ops move to the first slot of their device that is free behind what they need; an F only as far as no
    device then holds more activations, each from its F to its W, than the fullest did. From the first B of stage 0 to its last F the
    pipeline is full: ops overtake none there, since the block's own order is what other times than these fit in as well. Behind a device's
    last F nothing is allocated: its weight gradients wait there until the input gradients, which others wait for, have chosen.

    Stages are one row, backwards are split, slots are whole, every op lasts one.
    """
    device = [stage.device for stage in problem.stages]
    end = int(max(placed.values())) + 2
    last, changes = [0] * len(problem.devices), np.zeros((len(problem.devices), end), dtype=np.int64)
    for op, at in placed.items():
        d, slot = device[op.stage], int(at)
        if op.kind == Kind.F:
            last[d] = max(last[d], slot)
            changes[d, slot] += 1
        elif op.kind == Kind.W:
            changes[d, slot + 1] -= 1
    held = changes.cumsum(axis=1)
    most = held.max()
    full = range(int(placed[Op(Kind.B, 0, 0)]), int(placed[Op(Kind.F, 0, problem.microbatches - 1)]) + 1)

    in_turn = sorted((op.kind == Kind.W and at > last[device[op.stage]], int(at), op) for op, at in placed.items())
    taken = [bytearray(end) for _ in problem.devices]
    for waits, was, op in in_turn:
        taken[device[op.stage]][was] = not waits
    moved: dict[Op, int] = {}
    reached = [0] * len(problem.devices)  # the slot behind the last op that has moved
    for waits, was, op in in_turn:
        d, needs = device[op.stage], _needs(problem, op)
        slot = moved[needs] + 1 if needs else 0
        if was in full:
            slot = max(slot, reached[d])
        if op.kind == Kind.F and slot < was:
            too_much = np.flatnonzero(held[d, slot:was] == most)
            slot += int(too_much[-1]) + 1 if len(too_much) else 0
        if not waits:
            taken[d][was] = False
        slot = moved[op] = taken[d].index(False, slot)
        taken[d][slot] = True
        reached[d] = max(reached[d], slot + 1)
        if op.kind == Kind.F:
            held[d, slot:was] += 1
        elif op.kind == Kind.W:
            held[d, slot + 1 : was + 1] -= 1
    return moved


def _needs(problem: Problem, op: Op) -> Op | None:
    """The op that this one waits for, besides those of its own device."""
    kind, s, j, _ = op
    if kind == Kind.F:
        return Op(Kind.F, s - 1, j) if s else None
    if kind == Kind.B:
        return Op(Kind.B, s + 1, j) if s + 1 < len(problem.stages) else Op(Kind.F, s, j)
    return Op(Kind.B, s, j)
