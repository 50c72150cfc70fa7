"""Zero-bubble schedules: weight gradients wait for bubbles (Qi et al. 2023; Qi et al. 2024, Controllable Memory).

ZB-H1 and ZB-H2, one stage a device: stage s of p begins with k(p-s-1) forwards, then runs one forward, one input
gradient; its weight gradients are k·s micro-batches behind. So every device holds the same number of activations,
counted from F to W, and, counted from its own first op, begins and ends alike.

ZB-V, V-Half, V-Min and V-Auto, V-shaped: each device has two chunks; a micro-batch passes the second one on its way
back. In the building block it comes to the next device `there` slots later on the way there and `back` slots later on
the way back, in its forwards as in its backwards. So device i of p holds the first chunk's activation for (there +
back)(2(p-1) - i) slots, the second's for (there + back)i: the sum is the same on every device, and over an interval of
six slots it makes (there + back)(p-1)/3 chunks, besides what the ends of the V and W add. 1F1B's memory M is 2p chunks.
F, B and W are those of a chunk; the formulas are those of the paper's unit model, F = B = W = 1, where 1F1B's bubble is
6(p-1).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, groupby, islice, product

import numpy as np

from optpipe.model.arrays import Floats
from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, check
from optpipe_solver.systems.block import Block, reordered, slots, with_weights
from optpipe_solver.systems.system import by_slot, count_devices, in_order, published, warmed_up

INTERVAL = 6  # F, B and W of two chunks

Ends = tuple[int, int, int]

# V-Auto
SLOWEST = 5  # slots to the next device; with one slot back it holds as much as ZB-V
TURNS = 3  # of the devices from which on slots are fewer, the last ones that memory admits
LONGEST = 9  # slots of the three ends together
TRIES = 8  # blocks that are repeated,
OPS = 10_000  # of all of these blocks, about 0.1 s; at least one block is repeated


@published("zb-h1", "Qi et al. 2023 (Zero Bubble), section 2.1")
def zb_h1(problem: Problem) -> Schedule:
    """ZB-H1 (k = 1): 1F1B's memory, min(m, p) activations on every device.

    The paper's bubble, (p-1)(F + B - W), is for F = B = W. From m = p on it is (p-1)·max(B, F + B - W) in the span,
    (p-1)·max(F, B, F + B - W) in the makespan: however long W lasts, the last B passes all stages.
    """
    return _zero_bubble(problem, 1)


@published("zb-h2", "Qi et al. 2023 (Zero Bubble), section 2.2")
def zb_h2(problem: Problem) -> Schedule:
    """ZB-H2 (k = 2): twice 1F1B's memory, min(m, 2p-1) activations on every device.

    The paper's bubble, (p-1)(F + B - 2W), is for F = B = W: none. From m = 2p - 1 on it is (p-1)·max(0, F + B - 2W, B -
    F) in the span, and F counts as well in the makespan: the last device begins (p-1)F after the first.
    """
    return _zero_bubble(problem, 2)


def _zero_bubble(problem: Problem, k: int) -> Schedule:
    p, m = len(problem.stages), problem.microbatches
    lists: list[list[Op]] = [[] for _ in problem.devices]
    for s, stage in enumerate(problem.stages):
        late = min(k * s, m)
        forwards, inputs, weights = ([Op(kind, s, j) for j in range(m)] for kind in (Kind.F, Kind.B, Kind.W))
        backwards = [[b, *weights[max(0, j - late) : max(0, j - late + 1)]] for j, b in enumerate(inputs)]
        lists[stage.device] = warmed_up(forwards, backwards, k * (p - s - 1)) + weights[m - late :]
    return in_order(problem, lists)


@published("zb-v", "Qi et al. 2023 (Zero Bubble), section 6", least=2, most=2, chunks=2, shape="v")
def zb_v(problem: Problem) -> Schedule:
    """ZB-V, V-ZB of the later paper: three slots either way hold M, 2p chunks on every device.

    From m = 2p - 1 on there is no bubble in the span; the makespan is p - 1 longer. For other times the span's bubble
    is (p-1)·max(W - F, |F - B|, 2F - B - W, 2(F - W), 2(B - W)): none only where F = B = W.
    """
    return _v_schedule(problem, 3, 3, (1, 1, 1))


@published("v-half", "Qi et al. 2024 (Controllable Memory), section 3.2", least=2, most=2, chunks=2, shape="v")
def v_half(problem: Problem) -> Schedule:
    """V-Half: two slots there, one back hold 2·floor(p/2) + 2 chunks, about M/2.

    From m = p on the bubble is 3p - 4 for odd p and 3p - 7 for even p (0 for p = 1; 1 for p = 2, from m = 4 on), half
    1F1B's. For other times no micro-batch adds to it as long as W + 2B >= 2F and W + 2F >= 2B.

    Two slots there and one back are alike but for 3: ops that go either way stay apart where they differ by 1 or 2
    modulo 3, those that go the same way where they differ at all; hence the slots at the ends.
    """
    return _v_schedule(problem, 2, 1, (1, 1 if count_devices(problem) % 2 else 4, 2))


@published("v-min", "Qi et al. 2024 (Controllable Memory), section 3.2", least=2, most=2, chunks=2, shape="v")
def v_min(problem: Problem) -> Schedule:
    """V-Min: one slot either way, the least there is, holds 2·floor((p+4)/3) chunks, about M/3.

    From m = p on the bubble is 4p - 5, where 3 divides p 4p - 7, where it leaves 2 4p - 6 (0 for p = 1), two thirds of
    1F1B's.

    Ops that go different ways stay apart as one is in even slots where the other is in odd ones, F and B that go the
    same way as long as the 2p slots between them are no multiple of six, else with two more.
    """
    return _v_schedule(problem, 1, 1, (1, 1 if count_devices(problem) % 3 else 3, 1))


def v_path(there: Sequence[int], back: Sequence[int], ends: Ends) -> Block:
    """Return the building block without W.

    `there` and `back` are the slots from each device to the next on these ways; `ends` those from the first chunk's
    last F to the second's first F, from the last F to its B, and from the second chunk's last B to the first's first B.
    """
    first, last, second = ends
    path = [*accumulate([0, *there, first, *back, last, *there, second, *back])]
    return Block(path[: len(path) // 2], path[len(path) // 2 :][::-1])


def repeated(problem: Problem, block: Block) -> Schedule:
    """Return the shorter one of the block's two reorderings, by the problem's own op times."""
    table, slot = slots(block, range(0, INTERVAL * problem.microbatches, INTERVAL))
    orders = (reordered(problem, table, slot, wholly=wholly) for wholly in (False, True))
    return min((by_slot(problem, table, order) for order in orders), key=lambda schedule: schedule.makespan_ms)


def _v_schedule(problem: Problem, there: int, back: int, ends: Ends) -> Schedule:
    hops = count_devices(problem) - 1
    return repeated(problem, with_weights(problem, v_path([there] * hops, [back] * hops, ends), INTERVAL))


@published("v-auto", "Qi et al. 2024 (Controllable Memory), their code", least=2, most=2, chunks=2, shape="v")
def v_auto(problem: Problem) -> Schedule:
    """V-Auto, the scheduler in the paper's code: the shortest schedule that fits, V-Min if none does.

    It tries building blocks with any ends, the shortest first, of these those that hold most. On the way there a
    micro-batch comes to the next device `slow` slots later, from some device on `quick` slots later, on the way back
    one slot later; so memory grows in small steps with the number of slow devices.
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
                path = v_path(there, back, ends)
                slot = np.array([*path.forward, *path.backward]) % INTERVAL
                if np.bincount(np.tile(problem.costs.device, 2) * INTERVAL + slot).max() == 1:  # none is taken twice
                    block = with_weights(problem, path, INTERVAL)
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
