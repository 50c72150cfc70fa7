"""From the order of each device's ops to a schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count, pairwise

import numpy as np

from optpipe.errors import InputError
from optpipe.model.arrays import Floats, Table
from optpipe.model.ops import Op, Pair
from optpipe.model.problem import Problem
from optpipe.model.program import Program
from optpipe.model.records import Stage
from optpipe.schedule import Schedule


def in_order(problem: Problem, lists: Sequence[Iterable[Op | Pair]]) -> Schedule:
    """Make a schedule without transfers from the ops of each device, in order."""
    return Schedule(problem, tuple(Program.from_items(ops) for ops in lists))


def by_slot(problem: Problem, table: Table, slot: Floats) -> Schedule:
    """Make a schedule without transfers from rows of a program's table and the slot of each.

    Of two ops in one slot the one whose row comes first runs first.
    """
    return Schedule.in_order(problem, table[np.argsort(slot, kind="stable")])


def warmed_up(forwards: Sequence[Op], backwards: Sequence[Sequence[Op]], warm_up: int) -> list[Op]:
    """Order ops in the phases of 1F1B: `warm_up` forwards, then one forward, one backward, then the backwards left.

    A backward may be B and W.
    """
    ops = list(forwards[:warm_up])
    for k, backward in enumerate(backwards):
        ops += [*forwards[warm_up + k : warm_up + k + 1], *backward]
    return ops


def even_groups(m: int, size: int) -> list[range]:
    """Divide m micro-batches into as many groups of at least `size` as possible, as even as can be, larger ones first.

    If there are fewer than `size` they are one group.
    """
    groups = max(1, m // size)
    ends = [k * (m // groups) + min(k, m % groups) for k in range(groups + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


def visits(groups: Iterable[Sequence[int]], chunks: Iterable[int]) -> list[tuple[int, int]]:
    """Interleave: group by group, chunk by chunk, the group's micro-batches. Returns chunk and micro-batch."""
    chunks = list(chunks)
    return [(c, j) for group in groups for c in chunks for j in group]


def distinct_slots(first: int, chunks: int, apart: int) -> list[int]:
    """Return the slots of a device's chunks, each at least `apart` after the one before, no two the same modulo their
    number, so that chunks do not collide when all is repeated.

    Chunks wait gcd(apart, chunks) - 1 times in all; no other choice holds less.
    """
    slots = [first]
    while len(slots) < chunks:
        taken = {slot % chunks for slot in slots}
        slots.append(next(slot for slot in count(slots[-1] + apart) if slot % chunks not in taken))
    return slots


def require_level(s: int, stage: Stage, level: int) -> None:
    """Raises InputError if the stage has no level of this number."""
    if not 0 <= level < len(stage.all_levels):
        raise InputError(f"level = {level}: stages[{s}] has {len(stage.all_levels)}, numbered from 0")


def count_devices(problem: Problem) -> int:
    """How many devices run any stage."""
    return len({stage.device for stage in problem.stages})


def count_chunks(problem: Problem) -> int:
    """How many stages each of these devices runs."""
    return len(problem.stages) // count_devices(problem)
