"""From orders to schedules: what systems say of each device's ops, as programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from optpipe.model.arrays import Floats, Table
from optpipe.model.ops import Op, Pair
from optpipe.model.problem import Problem
from optpipe.model.program import STAGE, Program
from optpipe.schedule import Schedule


def in_order(problem: Problem, lists: Sequence[Iterable[Op | Pair]]) -> Schedule:
    """A schedule without transfers, from what each device runs, in order."""
    return Schedule(problem, tuple(Program.of(ops) for ops in lists))


def by_slot(problem: Problem, table: Table, slot: Floats) -> Schedule:
    """A schedule without transfers, from rows of a program's table and the slot in which each stands; of two in one
    slot the one that is named first comes first."""
    device = problem.costs.device[table[:, STAGE]]
    order = np.lexsort((slot, device))
    ends = np.searchsorted(device[order], np.arange(len(problem.devices) + 1))
    return Schedule(problem, tuple(Program(table[order[a:b]]) for a, b in pairwise(ends)))


def warmed_up(forwards: Sequence[Op], backwards: Sequence[Sequence[Op]], warm_up: int) -> list[Op]:
    """The phases of 1F1B: `warm_up` forwards, then in turn a forward and a backward (which may be B and W), then the
    backwards left."""
    ops = list(forwards[:warm_up])
    for k, backward in enumerate(backwards):
        ops += [*forwards[warm_up + k : warm_up + k + 1], *backward]
    return ops


def even_groups(m: int, size: int) -> list[range]:
    """As many groups of at least `size` micro-batches as m allow, as even as can be, the larger first; one where there
    are fewer."""
    count = max(1, m // size)
    ends = [k * (m // count) + min(k, m % count) for k in range(count + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


def visits(groups: Iterable[Sequence[int]], chunks: Iterable[int]) -> list[tuple[int, int]]:
    """The interleaving strategy: group by group, chunk by chunk in this order, the group's micro-batches. Chunk and
    micro-batch."""
    chunks = list(chunks)
    return [(c, j) for group in groups for c in chunks for j in group]
