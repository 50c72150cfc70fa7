"""V-Auto: V-shaped schedules for any memory from a third of 1F1B's up (Qi et al. 2024, the scheduler in their code).

It tries building blocks as those of `v_shape`, with any ends. On the way there a micro-batch comes to the next device
`slow` slots later, from some device on `quick` slots later, on the way back one slot later; so memory grows in small
steps with the number of slow devices.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import combinations, groupby, islice, product

import numpy as np

from optpipe.model.arrays import Floats
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, check
from optpipe_solver.systems.block import Block
from optpipe_solver.systems.system import System
from optpipe_solver.systems.v_shape import INTERVAL, Ends, repeated, v_block, v_min, v_path

SLOWEST = 5  # slots to the next device; with one slot back it holds as much as ZB-V
TURNS = 3  # of the devices from which on slots are fewer, the last ones that memory admits
LONGEST = 9  # slots of the three ends together
TRIES = 8  # blocks that are repeated,
OPS = 10_000  # of all of these blocks, about 0.1 s; at least one block is repeated


def v_auto(problem: Problem) -> Schedule:
    """Return the shortest schedule that fits, V-Min if none does.

    The blocks with the shortest ends are tried first, of these those that hold most.
    """
    tries = min(TRIES, max(1, OPS // (3 * len(problem.stages) * problem.microbatches)))
    schedules = (repeated(problem, block) for block in islice(_fitting_blocks(problem), tries))
    fitting = [schedule for schedule in schedules if not check(problem, schedule)]
    return min(fitting, key=lambda schedule: schedule.makespan_ms) if fitting else v_min(problem)


def _fitting_blocks(problem: Problem) -> Iterator[Block]:
    """Yield the blocks that hold, on average over time, no more than each device has room for."""
    back, steps, memory = [1] * (len(problem.stages) // 2 - 1), range(1, INTERVAL + 1), _Memory(problem)
    for length, alike in groupby(sorted(product(steps, steps, steps), key=sum), key=sum):
        if length > LONGEST:
            return
        fitting = dict[tuple[int, ...], tuple[float, Block]]()
        for ends in alike:
            for there in _ways(memory, back, ends):
                if not _collides(problem, v_path(there, back, ends)):
                    block = v_block(problem, there, back, ends)
                    if (share := memory.share(block)) <= 1.0:
                        fitting[*there, *ends] = share, block
        yield from (block for _, block in sorted(fitting.values(), key=lambda each: -each[0]))


def _ways(memory: _Memory, back: list[int], ends: Ends) -> Iterator[list[int]]:
    """Yield the slots from device to device on ways there that fit, some of them twice."""
    hops = len(back)
    for slow, quick in combinations(range(SLOWEST, 0, -1), 2):
        ways = [[slow] * turn + [quick] * (hops - turn) for turn in range(hops + 1)]
        fit = bisect_right(ways, 1.0, key=lambda there: memory.share(v_path(there, back, ends)))
        yield from ways[max(0, fit - TURNS) : fit]


class _Memory:
    """Which share of its memory a repeated block takes, if each micro-batch is the largest one."""

    def __init__(self, problem: Problem) -> None:
        self._device = problem.costs.device
        room = np.array([max(1, device.activation_budget_bytes) for device in problem.devices], dtype=np.float64)
        room = INTERVAL * room[self._device]
        self._whole: Floats = problem.costs.activation.max(axis=1) / room
        self._rest: Floats = problem.costs.saved_for_weight.max(axis=1) / room

    def share(self, block: Block) -> float:
        """Return that of the fullest device, on average over time; a W without a slot comes right after its B."""
        backward = np.array(block.backward)
        waiting = 1 if block.weight is None else np.array(block.weight) - backward
        held = self._whole * (backward + 1 - np.array(block.forward)) + self._rest * waiting
        return float(np.bincount(self._device, held).max())


def _collides(problem: Problem, block: Block) -> bool:
    """Whether an F or B of the repeated block takes the slot of another one on its device."""
    slot = np.array([*block.forward, *block.backward]) % INTERVAL
    return bool(np.bincount(np.tile(problem.costs.device, 2) * INTERVAL + slot).max() > 1)


SYSTEMS = (
    System("v-auto", "Qi et al. 2024 (Controllable Memory), their code", v_auto, least=2, most=2, chunks=2, shape="v"),
)
