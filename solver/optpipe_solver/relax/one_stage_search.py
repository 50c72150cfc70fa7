"""Best-first search over what a device with one stage can do: ops and transfers start, and time goes on. Compiled;
tests compare it with a plain one."""

from __future__ import annotations

import numpy as np

from optpipe.evaluate.jit import compiled, compiled_part
from optpipe_solver.relax.one_stage import (
    BACK,
    BACKWARD,
    BEGAN,
    BYTES,
    CHECKPOINT,
    DIRECTION,
    DUE,
    ENDS,
    FIRST_ACTIVATION,
    FORWARD,
    FORWARD_THEN_RECOMPUTE,
    IDLE,
    IMPOSSIBLE,
    IN_FLIGHT,
    OP,
    OP_ENDS,
    OUT,
    PARTS,
    READY,
    RECOMPUTE,
    RECOMPUTING,
    STARTED,
    WAITING_FOR_W,
    WEIGHT,
    WHOSE,
    OneStage,
    StageState,
    end_bound,
    is_moving,
)
from optpipe_solver.relax.states import (
    HEAPED,
    IS_COMPLETE,
    IS_FULL,
    NOW,
    States,
    add_unless_dominated,
    copy_columns,
    least_bound,
    read_best,
    remove_best,
)

ROUNDING_MS = 1e-6


@compiled
def expand(device: OneStage, room: tuple[StageState, ...], states: States, pops: int) -> float:
    """Take the best state and put in its place those that follow from it, `pops` times or until one is complete. Return
    the least end in ms: no schedule's is below; that of the complete state if there is one (`tally[IS_COMPLETE]`).

    Two streams, compute and the link, each start an op or wait for the next event: the end of what runs elsewhere, or
    that an input gradient may start. So every schedule that starts its ops as soon as its order allows is among those
    that follow.

    Activations with equally many parts there are interchangeable. So only one of them is tried: to leave, the one that
    began last; to come back or to have its B, the one that began first. An activation may leave more than once, and
    also after it was computed again: both only make the least end earlier. A BW is B followed at once by W, with the
    least bytes of both. `room` is for states to work on.

    A state's bound is at least that of the one before it: after the last B, a state no longer has the tail. After
    `tally[IS_FULL]` the search must not go on, as the state that had no room is gone.
    """
    state, row = room[0], room[0].row
    for _ in range(pops):
        if states.tally[HEAPED] == 0:
            break
        least = read_best(states, row)
        is_idle = row[OP] == IDLE and row[IN_FLIGHT] == 0.0 and row[WAITING_FOR_W] == 0.0
        if is_idle and row[STARTED] == device.microbatches:
            states.tally[IS_COMPLETE] = 1
            break
        remove_best(states)
        if row[STARTED] < device.microbatches and int(row[IN_FLIGHT]) == len(state.activations):
            states.tally[IS_FULL] = 1
            return least
        _add_successors(room, device, states, least)
        if states.tally[IS_FULL]:
            return least
    return least_bound(states)


@compiled_part
def _add_successors(room: tuple[StageState, ...], device: OneStage, states: States, least: float) -> None:
    """Add what follows from the first state with each op on compute and each transfer on each line."""
    state, computing, sending, following = room
    held = _bytes_held(state, device)
    for op in range(6):
        copy_columns(state.row, computing.row)
        with_op = _start_op(computing, op, device, held)
        if with_op == IMPOSSIBLE:
            continue
        transfers = 1 + 2 * int(computing.row[IN_FLIGHT])  # none, or of an activation out or back
        for first in range(transfers if device.lines else 1):
            copy_columns(computing.row, sending.row)
            with_first = _start_transfer(sending, 0, first, device, with_op)
            if with_first == IMPOSSIBLE:
                continue
            for second in range(transfers if device.lines == 2 else 1):
                copy_columns(sending.row, following.row)
                if _start_transfer(following, 1, second, device, with_first) == IMPOSSIBLE:
                    continue
                if not _go_to_next_event(following, device):
                    continue
                only_waited = op == IDLE and first + second == 0 and following.row[OP] == state.row[OP]
                for line in range(2):
                    only_waited = only_waited and following.lines[line, DIRECTION] == state.lines[line, DIRECTION]
                end = max(least, end_bound(following, device))
                width = FIRST_ACTIVATION + following.activations.shape[1] * int(following.row[IN_FLIGHT])
                add_unless_dominated(following.row, width, only_waited, end, states)
                if states.tally[IS_FULL]:
                    return


@compiled_part
def _bytes_held(state: StageState, device: OneStage) -> int:
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


# What can start now. Each function returns the bytes that are held then, or IMPOSSIBLE.


@compiled_part
def _start_op(state: StageState, op: int, device: OneStage, held: int) -> int:
    """Start an op on compute, or nothing."""
    row, activations, ms, memory = state.row, state.activations, device.ms, device.memory
    if op == IDLE:
        return held
    if row[OP] != IDLE:
        return IMPOSSIBLE
    if op == WEIGHT:
        if row[WAITING_FOR_W] == 0.0:
            return IMPOSSIBLE
        row[WAITING_FOR_W] -= 1.0
        op_ms, held = ms.weight, held + memory.weight - memory.waiting
    elif op == BACKWARD:
        i = _first_with(state, device.parts, row[NOW])
        if i < 0 or (len(device.meetings) and activations[0, DUE] > row[NOW]):
            return IMPOSSIBLE
        _remove_activation(state, i)
        if len(device.meetings):
            _meet_later_ones(state, device)
        op_ms, held = ms.backward, held + memory.backward - int(memory.present[device.parts])
    elif op == RECOMPUTE:
        i = _first_with(state, CHECKPOINT, np.inf)
        if i < 0:
            return IMPOSSIBLE
        activations[i, PARTS] = RECOMPUTING
        op_ms, held = ms.recompute, held + memory.recompute - memory.checkpoint
    else:
        will_be_recomputed = op == FORWARD_THEN_RECOMPUTE
        if row[STARTED] == device.microbatches or (will_be_recomputed and not device.can_recompute):
            return IMPOSSIBLE
        i = int(row[IN_FLIGHT])
        row[STARTED] += 1.0
        row[IN_FLIGHT] += 1.0
        activations[i, READY] = row[NOW] + ms.forward + ms.between
        activations[i, PARTS] = CHECKPOINT if will_be_recomputed else device.parts
        if len(device.meetings):
            activations[i, BEGAN], activations[i, DUE] = row[NOW], activations[i, READY]
        op, op_ms, held = FORWARD, ms.forward, held + memory.forward
    row[OP], row[OP_ENDS], row[BYTES] = op, row[NOW] + op_ms, held
    return held if held <= memory.budget else IMPOSSIBLE


@compiled_part
def _first_with(state: StageState, parts: int, ready_by: float) -> int:
    """The first activation with so many parts here, none of them moving, that is ready by then; -1 if there is none."""
    for i in range(int(state.row[IN_FLIGHT])):
        has_parts = state.activations[i, PARTS] == parts
        if has_parts and state.activations[i, READY] <= ready_by and not is_moving(state, i):
            return i
    return -1


@compiled_part
def _remove_activation(state: StageState, i: int) -> None:
    activations, lines, last = state.activations, state.lines, int(state.row[IN_FLIGHT]) - 1
    for j in range(i, last):
        activations[j, READY], activations[j, PARTS] = activations[j + 1, READY], activations[j + 1, PARTS]
    activations[last, READY] = activations[last, PARTS] = 0.0
    state.row[IN_FLIGHT] -= 1.0
    for line in range(2):
        if lines[line, DIRECTION] != 0.0 and lines[line, WHOSE] > i:
            lines[line, WHOSE] -= 1.0


@compiled_part
def _meet_later_ones(state: StageState, device: OneStage) -> None:
    """An input gradient starts: those after it wait for where their micro-batches met this one, as late as could be."""
    activations, meetings, count = state.activations, device.meetings, int(state.row[IN_FLIGHT])
    began, ends = activations[0, BEGAN], state.row[NOW] + device.ms.backward
    for k in range(count):
        at, since = 0, ends - activations[k + 1, BEGAN] + ROUNDING_MS
        while at + 1 < len(meetings) and meetings[at + 1, 0] <= since:
            at += 1
        due = began + meetings[at, 1] - device.ms.backward
        activations[k, BEGAN], activations[k, DUE] = activations[k + 1, BEGAN], max(due, activations[k + 1, DUE])
    activations[count, BEGAN] = activations[count, DUE] = 0.0


@compiled_part
def _start_transfer(state: StageState, line: int, choice: int, device: OneStage, held: int) -> int:
    """Let a line carry a part: choice 1 + 2i sends one of activation i out, 2 + 2i brings one back, 0 does nothing."""
    if choice == 0:
        return held
    row, lines, present = state.row, state.lines, device.memory.present
    i, direction = (choice - 1) // 2, OUT if choice % 2 else BACK
    if lines[line, DIRECTION] != 0.0 or (device.lines == 2 and (direction == OUT) != (line == 0)):
        return IMPOSSIBLE
    parts = int(state.activations[i, PARTS])
    if not _may_move(state, i, direction, device):
        return IMPOSSIBLE
    if direction == BACK:
        held += present[parts + 1] - present[parts]
    if row[OP] != IDLE:
        row[BYTES] = held
    lines[line, ENDS] = row[NOW] + (device.ms.offload if direction == OUT else device.ms.reload)
    lines[line, DIRECTION], lines[line, WHOSE] = direction, i
    return held if held <= device.memory.budget else IMPOSSIBLE


@compiled_part
def _may_move(state: StageState, i: int, direction: int, device: OneStage) -> bool:
    """Whether a part of an activation may go out or come back, and no other activation with as many parts comes first:
    the last one to leave, the first one to come back."""
    row, activations = state.row, state.activations
    parts, count = activations[i, PARTS], int(row[IN_FLIGHT])
    in_forward = count - 1 if row[OP] == FORWARD else count  # the activation whose forward runs, if any
    if i == in_forward or parts < (1 if direction == OUT else 0) or (direction == BACK and parts == device.parts):
        return False
    if is_moving(state, i):
        return True
    begin, end = (i + 1, count) if direction == OUT else (0, i)
    for j in range(begin, end):
        if activations[j, PARTS] == parts and j != in_forward and not is_moving(state, j):
            return False
    return True


# Time goes on


@compiled_part
def _go_to_next_event(state: StageState, device: OneStage) -> bool:
    """Go on until compute or a line ends or, with compute idle, an input gradient may start. False if none does."""
    row, lines, activations, event = state.row, state.lines, state.activations, np.inf
    if row[OP] != IDLE:
        event = row[OP_ENDS]
    else:
        for i in range(int(row[IN_FLIGHT])):
            if activations[i, READY] > row[NOW]:
                event = min(event, activations[i, READY])
        if len(device.meetings):
            event = min(event, _next_meeting(state, device))
    for line in range(2):
        if lines[line, DIRECTION] != 0.0:
            event = min(event, lines[line, ENDS])
    if event == np.inf:
        return False
    _end_op(state, event, device)
    for line in range(2):
        if lines[line, DIRECTION] != 0.0 and lines[line, ENDS] <= event:
            activations[int(lines[line, WHOSE]), PARTS] += 1.0 if lines[line, DIRECTION] == BACK else -1.0
            lines[line, ENDS] = lines[line, DIRECTION] = lines[line, WHOSE] = 0.0
    row[NOW] = event
    for i in range(int(row[IN_FLIGHT])):  # states that differ only in the past are equal
        activations[i, READY] = max(activations[i, READY], event)
        if len(device.meetings):
            activations[i, DUE] = max(activations[i, DUE], event)
    _sort_equally_ready(state)
    return True


@compiled_part
def _next_meeting(state: StageState, device: OneStage) -> float:
    """When the next input gradient may start or, if it may, meets a later micro-batch one stage further."""
    row, activations, meetings = state.row, state.activations, device.meetings
    if row[IN_FLIGHT] == 0.0:
        return np.inf
    if activations[0, DUE] > row[NOW]:
        return float(activations[0, DUE])
    event = np.inf
    for k in range(1, int(row[IN_FLIGHT])):
        for at in range(len(meetings)):
            starts = activations[k, BEGAN] + meetings[at, 0] - device.ms.backward
            if starts > row[NOW] + ROUNDING_MS:
                event = min(event, starts)
    return float(event)


@compiled_part
def _end_op(state: StageState, event: float, device: OneStage) -> None:
    """End the op on compute if it ends with this event."""
    row, activations = state.row, state.activations
    if row[OP] == IDLE or row[OP_ENDS] > event:
        return
    if row[OP] == BACKWARD:
        row[WAITING_FOR_W] += device.ms.weight > 0.0
    elif row[OP] == RECOMPUTE:
        for i in range(int(row[IN_FLIGHT])):
            if activations[i, PARTS] == RECOMPUTING:
                activations[i, PARTS] = device.parts
    row[OP_ENDS] = row[OP] = row[BYTES] = 0.0


@compiled_part
def _sort_equally_ready(state: StageState) -> None:
    """Sort activations that are ready at the same time, most parts first; the one whose forward runs stays the last."""
    row, lines, activations, count = state.row, state.lines, state.activations, int(state.row[IN_FLIGHT])
    for i in range(1, count):
        j = i
        while (
            j > 0
            and activations[j, READY] == activations[j - 1, READY]
            and activations[j, PARTS] > activations[j - 1, PARTS]
            and not (row[OP] == FORWARD and j == count - 1)
        ):
            activations[j, PARTS], activations[j - 1, PARTS] = activations[j - 1, PARTS], activations[j, PARTS]
            for line in range(2):  # what carries a part of the one carries one of the other
                if lines[line, DIRECTION] != 0.0 and lines[line, WHOSE] in (j - 1, j):
                    lines[line, WHOSE] = 2 * j - 1 - lines[line, WHOSE]
            j -= 1
