"""A state of the search over a device with one stage: what its columns are, and what they say."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optpipe.evaluate.jit import compiled_part, compiled_part_in_place
from optpipe.model.arrays import Flags, Floats
from optpipe_solver.relax.one_stage import OneStage

MOST_ACTIVATIONS = 128  # before their B; a search ends where there would be more

# Columns of a state after NOW, the first
OP_ENDS = 1  # when the op on compute ends
OP = 2  # which op that is
STARTED = 3  # forwards
WAITING_FOR_W = 4  # activations after their B
LINES = 5  # the first column of `State.lines`
IN_FLIGHT = 11  # activations before their B
BYTES = 12  # held until the op on compute ends
FIRST_ACTIVATION = 13  # the first column of `State.activations`
# Columns of `State.lines`: when the transfer on it ends, its direction, and whose part it carries.
ENDS, DIRECTION, WHOSE = 0, 1, 2
# Columns of `State.activations`: when its B may start if the activation is here by then; how many of its parts are
# here.
READY, PARTS = 0, 1
WIDTH = 2

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
    activations
        (most, 2) the activations in flight, in the order of READY.
    """

    row: Floats
    lines: Floats
    activations: Floats


@compiled_part
def empty_state(columns: int) -> State:
    row = np.zeros(columns)
    activations = row[FIRST_ACTIVATION:].reshape((columns - FIRST_ACTIVATION) // WIDTH, WIDTH)
    return State(row, row[LINES:IN_FLIGHT].reshape(2, 3), activations)


def must_equal(microbatches: int) -> Flags:
    """Return the mask of the columns that must be equal for one state to dominate another."""
    mask = np.zeros(FIRST_ACTIVATION + WIDTH * min(microbatches, MOST_ACTIVATIONS), dtype=bool)
    mask[[OP, STARTED, IN_FLIGHT]] = True
    mask[LINES:IN_FLIGHT].reshape(2, 3)[:, [DIRECTION, WHOSE]] = True
    mask[FIRST_ACTIVATION:].reshape(-1, WIDTH)[:, PARTS] = True
    return mask


@compiled_part_in_place
def is_complete(state: State, device: OneStage) -> bool:
    row = state.row
    if row[STARTED] < device.microbatches or row[OP] != IDLE:
        return False
    return bool(row[IN_FLIGHT] == 0.0 and row[WAITING_FOR_W] == 0.0)


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
    held = int(row[WAITING_FOR_W]) * memory.waiting
    for i in range(int(row[IN_FLIGHT])):
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
    lines, moves = state.lines, False
    for line in range(2):
        moves = moves or (lines[line, DIRECTION] != 0.0 and lines[line, WHOSE] == i)
    return moves
