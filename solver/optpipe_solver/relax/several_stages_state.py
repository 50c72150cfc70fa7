"""A state of the search over a device with several stages: what its columns are, and what they say."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optpipe.evaluate.jit import compiled_part, compiled_part_in_place
from optpipe.model.arrays import Flags, Floats
from optpipe_solver.relax.several_stages import SeveralStages

MOST_UNDER_WAY = 128  # micro-batches that a state tells apart

# Columns of a state after NOW: micro-batches that have started, and how many of them are between two steps.
STARTED, UNDER_WAY, WAITING = 1, 2, 3
# Columns of `State.microbatches`: when its next step may start, and which step that is.
READY, STEP = 0, 1
WIDTH = 2


class State(NamedTuple):
    """A state as named arrays over one row of numbers.

    Attributes
    ----------
    row
        All columns.
    waiting
        (groups,) weight gradients that wait.
    microbatches
        (most, 2) those under way, in the order of their steps, then of READY.
    """

    row: Floats
    waiting: Floats
    microbatches: Floats


@compiled_part
def empty_state(columns: int, device: SeveralStages) -> State:
    row = np.zeros(columns)
    first = WAITING + len(device.weights.ms)
    microbatches = row[first:].reshape((columns - first) // WIDTH, WIDTH)
    return State(row, row[WAITING:first], microbatches)


@compiled_part_in_place
def width(state: State) -> int:
    """How many columns the state uses."""
    return len(state.row) - WIDTH * (len(state.microbatches) - int(state.row[UNDER_WAY]))


def must_equal(device: SeveralStages) -> Flags:
    """Return the mask of the columns that must be equal for one state to dominate another."""
    first = WAITING + len(device.weights.ms)
    mask = np.zeros(first + WIDTH * min(device.microbatches, MOST_UNDER_WAY), dtype=bool)
    mask[[STARTED, UNDER_WAY]] = True
    mask[first:].reshape(-1, WIDTH)[:, STEP] = True
    return mask


@compiled_part_in_place
def is_complete(state: State, device: SeveralStages) -> bool:
    if state.row[STARTED] < device.microbatches or state.row[UNDER_WAY] > 0.0:
        return False
    waiting = 0.0
    for g in range(len(state.waiting)):
        waiting += state.waiting[g]
    return bool(waiting == 0.0)


@compiled_part_in_place
def bytes_held(state: State, device: SeveralStages) -> int:
    """The bytes that are held between ops."""
    held = 0
    for i in range(int(state.row[UNDER_WAY])):
        held += device.memory.held[int(state.microbatches[i, STEP])]
    for g in range(len(state.waiting)):
        held += device.weights.waiting_bytes[g] * int(state.waiting[g])
    return held
