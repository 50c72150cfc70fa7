"""A state of the search over a device with one stage: what its columns are, and what they say."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optpipe.evaluate.jit import compiled_part, compiled_part_in_place
from optpipe.model.arrays import Flags, Floats
from optpipe_solver.relax.one_stage import BOTTLENECKS, OneStage

MOST_ACTIVATIONS = 128  # that a state tells apart

# Columns of a state after NOW: when the op on compute ends, and which op that is; forwards started; activations that
# wait for their weight gradient; activations before their input gradient; bytes held until the op on compute ends.
OP_ENDS, OP, STARTED, WAITING = 1, 2, 3, 4
LINES, ACTIVATIONS, BYTES, PASSED = 5, 11, 12, 13
FIRST = PASSED + BOTTLENECKS  # of the activations' rows
# Columns of `State.lines`: when the transfer on it ends, its direction, and whose part it carries.
ENDS, DIRECTION, WHOSE = 0, 1, 2
# Columns of `State.activations`: when its input gradient may start as far as the activation itself is concerned; how
# many of its parts are there; and, of the n-th row, when the n-th input gradient from now on may start, whosever it is.
READY, PARTS, TURN = 0, 1, 2
WIDTH = 3

# What compute can start; a forward whose activation is to be computed again runs as FORWARD.
IDLE, FORWARD, FORWARD_THEN_RECOMPUTE, BACKWARD, RECOMPUTE, WEIGHT = range(6)
OUT, BACK = 1, 2  # directions of a transfer; 0: none
# In place of the parts of an activation that are there: it is to be computed again, or is being computed.
CHECKPOINT, RECOMPUTING = -1, -2
IMPOSSIBLE = -1  # in place of the bytes that are held


class State(NamedTuple):
    """A state as named arrays over one row of numbers.

    Attributes
    ----------
    row
        All columns.
    lines
        (2, 3) what each line to the host carries.
    passed
        (bottlenecks,) when the last micro-batch to begin can be back here from each bottleneck.
    activations
        (most, 3) the activations before their input gradient, in the order of READY.
    """

    row: Floats
    lines: Floats
    passed: Floats
    activations: Floats


@compiled_part
def empty_state(columns: int) -> State:
    row = np.zeros(columns)
    activations = row[FIRST:].reshape((columns - FIRST) // WIDTH, WIDTH)
    return State(row, row[LINES:ACTIVATIONS].reshape(2, 3), row[PASSED:FIRST], activations)


def must_equal(microbatches: int) -> Flags:
    """Return the mask of the columns that must be equal for one state to dominate another."""
    mask = np.zeros(FIRST + WIDTH * min(microbatches, MOST_ACTIVATIONS), dtype=bool)
    mask[[OP, STARTED, ACTIVATIONS]] = True
    mask[LINES:ACTIVATIONS].reshape(2, 3)[:, [DIRECTION, WHOSE]] = True
    mask[FIRST:].reshape(-1, WIDTH)[:, PARTS] = True
    return mask


@compiled_part_in_place
def is_complete(state: State, device: OneStage) -> bool:
    row = state.row
    if row[STARTED] < device.microbatches or row[OP] != IDLE:
        return False
    return bool(row[ACTIVATIONS] == 0.0 and row[WAITING] == 0.0)


@compiled_part_in_place
def has_same_ops(a: State, b: State) -> bool:
    """Whether the same ops run in both."""
    same_transfers = a.lines[0, DIRECTION] == b.lines[0, DIRECTION] and a.lines[1, DIRECTION] == b.lines[1, DIRECTION]
    return bool(a.row[OP] == b.row[OP] and same_transfers)


@compiled_part_in_place
def bytes_held(state: State, device: OneStage) -> int:
    """The bytes that are held now. None is free before the op that runs has ended."""
    row, lines, activations, memory = state.row, state.lines, state.activations, device.memory
    if row[OP] != IDLE:
        return int(row[BYTES])
    held = int(row[WAITING]) * memory.waiting
    for i in range(int(row[ACTIVATIONS])):
        parts = int(activations[i, PARTS])
        held += memory.checkpoint if parts == CHECKPOINT else memory.present[parts]
    for line in range(2):
        if lines[line, DIRECTION] == BACK:
            parts = int(activations[int(lines[line, WHOSE]), PARTS])
            held += memory.present[parts + 1] - memory.present[parts]
    return int(held)


@compiled_part_in_place
def is_moving(state: State, i: int) -> bool:
    """Whether a part of an activation is on a line."""
    lines, is_moving = state.lines, False
    for line in range(2):
        is_moving = is_moving or (lines[line, DIRECTION] != 0.0 and lines[line, WHOSE] == i)
    return is_moving
