"""Best-first search over what a device with one stage can do. Compiled; `support/one_device.py` is its plain reference.

A state is a row of numbers; its first ones are named here, and `State` names the others as arrays over the same row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optpipe.evaluate.jit import compiled
from optpipe.model.arrays import Flags, Floats
from optpipe_solver.relax.one_stage import BOTTLENECKS, OneStage
from optpipe_solver.relax.states import (
    IS_COMPLETE,
    IS_FULL,
    NOW,
    ROWS,
    States,
    add_unless_dominated,
    copy_columns,
    is_over,
    least_bound,
    read_best,
    remove_best,
)
from optpipe_solver.relax.uncounted import uncounted

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
        (bottlenecks,) when the last micro-batch can have passed each bottleneck.
    activations
        (most, 3) the activations before their input gradient, in the order of READY.
    """

    row: Floats
    lines: Floats
    passed: Floats
    activations: Floats


@compiled
def _empty_state(columns: int) -> State:
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


@compiled
def expand(device: OneStage, states: States, pops: int) -> float:
    """Take the best state and put in its place those that follow from it, `pops` times or until one is complete.

    Two streams, compute and the link, each start an op or wait for the next event: the end of what runs elsewhere, or
    that an input gradient may start. So every schedule that starts its ops as soon as its order allows is among those
    that follow.

    Of activations with equally many parts there, the one that began last loses a part, the one that began first gets
    one back, and has its input gradient first: the others' further ways can be exchanged, and none waits longer, as
    those who wait for other devices do so by rank, whichever activation it is. An activation may leave more than once,
    which only makes the least end earlier.

    Returns
    -------
    The least end in ms: no schedule's is below; that of the complete state if there is one (`tally[IS_COMPLETE]`).
    """
    columns = len(states.must_equal)
    state, computing = _empty_state(columns), _empty_state(columns)
    sending, following = _empty_state(columns), _empty_state(columns)
    if states.tally[ROWS] == 0:
        add_unless_dominated(state.row, FIRST, False, _least_end(state, device), states)
    for _ in range(pops):
        if is_over(states):
            break
        least = read_best(states, state.row)
        if _is_complete(state, device):
            states.tally[IS_COMPLETE] = 1
            break
        remove_best(states)
        if state.row[STARTED] < device.microbatches and int(state.row[ACTIVATIONS]) == len(state.activations):
            states.tally[IS_FULL] = 1
            return least
        _add_successors(state, computing, sending, following, device, states, least)
        if states.tally[IS_FULL]:
            return least
    return least_bound(states)


@uncounted
def _is_complete(state: State, device: OneStage) -> bool:
    row = state.row
    if row[STARTED] < device.microbatches or row[OP] != IDLE:
        return False
    return bool(row[ACTIVATIONS] == 0.0 and row[WAITING] == 0.0)


@uncounted
def _add_successors(
    state: State, computing: State, sending: State, following: State, device: OneStage, states: States, least: float
) -> None:
    """Add what follows from a state with each op on compute and each transfer on each line; three states to work on."""
    held = _bytes_held(state, device)
    for op in range(6):
        copy_columns(state.row, computing.row)
        with_op = _start_op(computing, op, device, held)
        if with_op == IMPOSSIBLE:
            continue
        transfers = 1 + 2 * int(computing.row[ACTIVATIONS])  # none, or of an activation out or back
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
                only_waited = op == IDLE and first + second == 0 and _has_same_ops(state, following)
                end = max(least, _least_end(following, device))
                width = FIRST + WIDTH * int(following.row[ACTIVATIONS])
                add_unless_dominated(following.row, width, only_waited, end, states)
                if states.tally[IS_FULL]:
                    return


@uncounted
def _has_same_ops(a: State, b: State) -> bool:
    """Whether the same ops run in both."""
    same_transfers = a.lines[0, DIRECTION] == b.lines[0, DIRECTION] and a.lines[1, DIRECTION] == b.lines[1, DIRECTION]
    return bool(a.row[OP] == b.row[OP] and same_transfers)


# What is held


@uncounted
def _bytes_held(state: State, device: OneStage) -> int:
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


@uncounted
def _is_moving(state: State, i: int) -> bool:
    """Whether a part of an activation is on a line."""
    lines, is_moving = state.lines, False
    for line in range(2):
        is_moving = is_moving or (lines[line, DIRECTION] != 0.0 and lines[line, WHOSE] == i)
    return is_moving


# What can start now. Each function returns the bytes that are held then, or IMPOSSIBLE.


@uncounted
def _start_op(state: State, op: int, device: OneStage, held: int) -> int:
    """Start an op on compute, or nothing."""
    if op == IDLE:
        return held
    if state.row[OP] != IDLE:
        return IMPOSSIBLE
    if op == WEIGHT:
        held = _start_weight_gradient(state, device, held)
    elif op == BACKWARD:
        held = _start_backward(state, device, held)
    elif op == RECOMPUTE:
        held = _start_recompute(state, device, held)
    else:
        held = _start_forward(state, op, device, held)
    state.row[BYTES] = held
    return held if held <= device.memory.budget else IMPOSSIBLE


@uncounted
def _run(state: State, op: int, ms: float) -> None:
    state.row[OP], state.row[OP_ENDS] = op, state.row[NOW] + ms


@uncounted
def _start_weight_gradient(state: State, device: OneStage, held: int) -> int:
    if state.row[WAITING] == 0.0:
        return IMPOSSIBLE
    _run(state, WEIGHT, device.ms.weight)
    state.row[WAITING] -= 1.0
    return held + device.memory.weight - device.memory.waiting


@uncounted
def _start_forward(state: State, op: int, device: OneStage, held: int) -> int:
    row, activations, ms = state.row, state.activations, device.ms
    is_recomputed = op == FORWARD_THEN_RECOMPUTE
    if row[STARTED] == device.microbatches or (is_recomputed and not device.can_recompute):
        return IMPOSSIBLE
    _run(state, FORWARD, ms.forward)
    row[STARTED] += 1.0
    i = int(row[ACTIVATIONS])
    row[ACTIVATIONS] += 1.0
    activations[i, READY] = row[OP_ENDS] + ms.away
    activations[i, PARTS] = CHECKPOINT if is_recomputed else device.parts
    for b in range(len(state.passed)):
        passes_ms, works_ms = device.bottlenecks[b]
        state.passed[b] = max(state.passed[b] + works_ms, row[OP_ENDS] + passes_ms)
        activations[i, TURN] = max(activations[i, TURN], state.passed[b])
    return held + device.memory.forward


@uncounted
def _start_recompute(state: State, device: OneStage, held: int) -> int:
    """Compute the first activation again that has only its checkpoint."""
    for i in range(int(state.row[ACTIVATIONS])):
        if state.activations[i, PARTS] == CHECKPOINT:
            _run(state, RECOMPUTE, device.ms.recompute)
            state.activations[i, PARTS] = RECOMPUTING
            return held + device.memory.recompute - device.memory.checkpoint
    return IMPOSSIBLE


@uncounted
def _start_backward(state: State, device: OneStage, held: int) -> int:
    """Start the input gradient of the first activation that is ready and there as a whole."""
    now, activations = state.row[NOW], state.activations
    if activations[0, TURN] > now:
        return IMPOSSIBLE
    for i in range(int(state.row[ACTIVATIONS])):
        is_ready = activations[i, READY] <= now and activations[i, PARTS] == device.parts
        if is_ready and not _is_moving(state, i):
            _run(state, BACKWARD, device.ms.backward)
            _remove_activation(state, i)
            return held + device.memory.backward - int(device.memory.present[device.parts])
    return IMPOSSIBLE


@uncounted
def _remove_activation(state: State, i: int) -> None:
    """Remove an activation, and the first turn."""
    activations, lines, last = state.activations, state.lines, int(state.row[ACTIVATIONS]) - 1
    for j in range(i, last):
        activations[j, READY], activations[j, PARTS] = activations[j + 1, READY], activations[j + 1, PARTS]
    for rank in range(last):
        activations[rank, TURN] = activations[rank + 1, TURN]
    activations[last, READY] = activations[last, PARTS] = activations[last, TURN] = 0.0
    state.row[ACTIVATIONS] -= 1.0
    for line in range(2):
        if lines[line, DIRECTION] != 0.0 and lines[line, WHOSE] > i:
            lines[line, WHOSE] -= 1.0


@uncounted
def _start_transfer(state: State, line: int, choice: int, device: OneStage, held: int) -> int:
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


@uncounted
def _may_move(state: State, i: int, direction: int, device: OneStage) -> bool:
    """Whether a part of an activation may go out or come back, and no other activation with as many parts comes first:
    the last one to leave, the first one to come back."""
    row, activations = state.row, state.activations
    parts, count = activations[i, PARTS], int(row[ACTIVATIONS])
    in_forward = count - 1 if row[OP] == FORWARD else count  # the activation whose forward runs, if any
    if i == in_forward or parts < (1 if direction == OUT else 0) or (direction == BACK and parts == device.parts):
        return False
    if _is_moving(state, i):
        return True
    begin, end = (i + 1, count) if direction == OUT else (0, i)
    for j in range(begin, end):
        if activations[j, PARTS] == parts and j != in_forward and not _is_moving(state, j):
            return False
    return True


# Time goes on


@uncounted
def _go_to_next_event(state: State, device: OneStage) -> bool:
    """Go to the next event. False if there is none."""
    event = _next_event(state)
    if event == np.inf:
        return False
    _end_op(state, event, device)
    _end_transfers(state, event)
    state.row[NOW] = event
    _forget_the_past(state, device)
    _sort_equally_ready(state)
    return True


@uncounted
def _next_event(state: State) -> float:
    """When the op on compute or a transfer ends or, with compute idle, an input gradient may start."""
    row, lines, activations, event = state.row, state.lines, state.activations, np.inf
    count, now = int(row[ACTIVATIONS]), row[NOW]
    if row[OP] != IDLE:
        event = row[OP_ENDS]
    else:
        for i in range(count):
            if activations[i, READY] > now:
                event = min(event, activations[i, READY])
        if count and activations[0, TURN] > now:
            event = min(event, activations[0, TURN])
    for line in range(2):
        if lines[line, DIRECTION] != 0.0:
            event = min(event, lines[line, ENDS])
    return float(event)


@uncounted
def _end_op(state: State, event: float, device: OneStage) -> None:
    row, activations = state.row, state.activations
    if row[OP] == IDLE or row[OP_ENDS] > event:
        return
    if row[OP] == BACKWARD:
        row[WAITING] += device.ms.weight > 0.0
    elif row[OP] == RECOMPUTE:
        for i in range(int(row[ACTIVATIONS])):
            if activations[i, PARTS] == RECOMPUTING:
                activations[i, PARTS] = device.parts
    row[OP_ENDS] = row[OP] = row[BYTES] = 0.0


@uncounted
def _end_transfers(state: State, event: float) -> None:
    lines = state.lines
    for line in range(2):
        if lines[line, DIRECTION] != 0.0 and lines[line, ENDS] <= event:
            change = 1.0 if lines[line, DIRECTION] == BACK else -1.0
            state.activations[int(lines[line, WHOSE]), PARTS] += change
            lines[line, ENDS] = lines[line, DIRECTION] = lines[line, WHOSE] = 0.0


@uncounted
def _forget_the_past(state: State, device: OneStage) -> None:
    """Raise the times that are over to now, so that states that differ only there are equal."""
    row, activations, now = state.row, state.activations, state.row[NOW]
    for i in range(int(row[ACTIVATIONS])):
        activations[i, READY] = max(activations[i, READY], now)
        activations[i, TURN] = max(activations[i, TURN], now)
    for b in range(len(state.passed)):  # the next one to pass it has its forward yet to begin
        passes_ms, works_ms = device.bottlenecks[b]
        soonest = now + device.ms.forward + passes_ms - works_ms
        state.passed[b] = max(state.passed[b], soonest) if row[STARTED] < device.microbatches else 0.0


@uncounted
def _sort_equally_ready(state: State) -> None:
    """Sort activations that are ready at the same time by their parts; the one whose forward runs stays the last."""
    row, activations, count = state.row, state.activations, int(state.row[ACTIVATIONS])
    for i in range(1, count):
        j = i
        while (
            j > 0
            and activations[j, READY] == activations[j - 1, READY]
            and activations[j, PARTS] > activations[j - 1, PARTS]
            and not (row[OP] == FORWARD and j == count - 1)
        ):
            activations[j, PARTS], activations[j - 1, PARTS] = activations[j - 1, PARTS], activations[j, PARTS]
            _swap_transfers(state, j - 1, j)
            j -= 1


@uncounted
def _swap_transfers(state: State, i: int, j: int) -> None:
    """Let lines that carry a part of one of two activations carry one of the other."""
    lines = state.lines
    for line in range(2):
        if lines[line, DIRECTION] != 0.0:
            if lines[line, WHOSE] == j:
                lines[line, WHOSE] = i
            elif lines[line, WHOSE] == i:
                lines[line, WHOSE] = j


# The least end


class Remaining(NamedTuple):
    """What is left to do in a state.

    Attributes
    ----------
    forwards, backwards
        Micro-batches that have not begun; input gradients to start.
    op_ms
        Of the op that runs.
    compute_ms, weight_ms
        Of compute without weight gradients, and of weight gradients, but for one that runs.
    out_ms, back_ms
        Of the link: transfers that run, and parts that have to come back.
    whole
        Activations of which all parts can still leave, those to come included.
    """

    forwards: float
    backwards: float
    op_ms: float
    compute_ms: float
    weight_ms: float
    out_ms: float
    back_ms: float
    whole: float


@uncounted
def _least_end(state: State, device: OneStage) -> float:
    """No schedule that begins like this ends sooner: by compute, by the way of each micro-batch, by link and memory."""
    remaining = _remaining(state, device)
    now = state.row[NOW]
    end = _end_by_paths(state, remaining, device)
    end = max(end, now + remaining.compute_ms + remaining.weight_ms)
    if remaining.backwards == 0.0:
        return float(end)
    end = max(end, now + remaining.compute_ms + device.ms.tail)
    for measure in range(len(device.worth.forward)):
        end = max(end, _end_by_memory(state, remaining, measure, end, device))
    return float(end)


@uncounted
def _remaining(state: State, device: OneStage) -> Remaining:
    row, lines, activations, ms = state.row, state.lines, state.activations, device.ms
    now, count, forwards = row[NOW], int(row[ACTIVATIONS]), device.microbatches - row[STARTED]
    recompute_ms, away, whole = 0.0, 0.0, forwards
    for i in range(count):
        parts = activations[i, PARTS]
        if parts == CHECKPOINT:
            recompute_ms += ms.recompute
        elif parts >= 0.0:
            away += device.parts - parts
            whole += parts == device.parts
    out_ms, back_ms = 0.0, 0.0
    for line in range(2):
        if lines[line, DIRECTION] == OUT:
            out_ms += lines[line, ENDS] - now
            away += 1.0
        elif lines[line, DIRECTION] == BACK:
            back_ms += lines[line, ENDS] - now
            away -= 1.0
    op_ms = max(0.0, row[OP_ENDS] - now) if row[OP] != IDLE else 0.0
    backwards = forwards + count
    compute_ms = forwards * ms.forward + backwards * ms.backward + recompute_ms + op_ms
    weight_ms = (backwards + row[WAITING]) * ms.weight + (ms.weight if row[OP] == BACKWARD else 0.0)
    return Remaining(forwards, backwards, op_ms, compute_ms, weight_ms, out_ms, back_ms + away * ms.reload, whole)


@uncounted
def _end_by_paths(state: State, remaining: Remaining, device: OneStage) -> float:
    """The least end by the way of each micro-batch alone."""
    row, activations, ms = state.row, state.activations, device.ms
    free, forwards = row[NOW] + remaining.op_ms, remaining.forwards
    end = free + ms.tail if row[OP] == BACKWARD else row[NOW]
    if forwards:
        end = free + forwards * ms.forward + ms.away + ms.backward + ms.tail
        for b in range(len(state.passed)):
            passes_ms, works_ms = device.bottlenecks[b]
            last = max(state.passed[b] + works_ms, free + ms.forward + passes_ms) + (forwards - 1.0) * works_ms
            end = max(end, last + ms.backward + ms.tail)
    for i in range(int(row[ACTIVATIONS])):
        end = max(end, max(activations[i, READY], activations[i, TURN]) + ms.backward + ms.tail)
    return float(end)


@uncounted
def _end_by_memory(state: State, remaining: Remaining, measure: int, end: float, device: OneStage) -> float:
    """The least end by memory over time, if at least `end`: of the activations that are yet to begin, some are computed
    again; of the others, parts leave as long as that pays."""
    now, ms, worth = state.row[NOW], device.ms, device.worth
    need = _memory_needed(state, remaining, measure, device)
    best = np.inf
    for computed in range(int(remaining.forwards) + 1 if device.can_recompute else 1):
        by_memory = need - computed * worth.saved_by_recompute[measure]
        begin = max(end, now + remaining.compute_ms + remaining.weight_ms + computed * ms.recompute)
        sent, level, sent_at_level = 0.0, 0, 0.0  # parts that leave, the first of each activation first
        while begin < best:
            by_line = _end_by_lines(now, sent, remaining, device)
            best = min(best, max(begin, now + by_memory, by_line))
            if by_line >= now + by_memory or now + by_memory <= begin or device.lines == 0 or level == device.parts:
                break
            by_memory -= worth.saved_by_part[measure, level]
            sent += 1.0
            sent_at_level += 1.0
            if sent_at_level >= remaining.whole - computed:
                level, sent_at_level = level + 1, 0.0
        if begin >= best:
            break
    return float(best)


@uncounted
def _end_by_lines(now: float, sent: float, remaining: Remaining, device: OneStage) -> float:
    """The least end by the lines if so many further parts leave and come back."""
    ms = device.ms
    if device.lines == 1:
        line_ms = remaining.out_ms + remaining.back_ms + sent * (ms.offload + ms.reload)
    else:
        line_ms = max(remaining.out_ms + sent * ms.offload, remaining.back_ms + sent * ms.reload)
    return float(now + line_ms + ms.backward + ms.tail if line_ms > 0.0 else now)


@uncounted
def _memory_needed(state: State, remaining: Remaining, measure: int, device: OneStage) -> float:
    """ms of all the memory that are needed from now on by this measure if no further part leaves."""
    op, ms, worth = state.row[OP], device.ms, device.worth
    forwards, backwards = remaining.forwards, remaining.backwards
    area = forwards * (ms.forward * worth.forward[measure] + ms.away * worth.present[measure, device.parts])
    area += backwards * ms.backward * worth.backward[measure]
    area += remaining.weight_ms * worth.weight[measure]
    if op == BACKWARD:
        area += remaining.op_ms * worth.backward[measure]
    elif op == WEIGHT:
        area += remaining.op_ms * worth.weight[measure]
    for i in range(int(state.row[ACTIVATIONS])):
        area = _add_memory_while_away(area, state, remaining, i, measure, device)
    unused, n = 0.0, 1  # while the last but n input gradient runs, n + 1 activations are there at most
    while n < backwards and n * worth.alone[measure] < 1.0:
        unused += ms.backward * (1.0 - n * worth.alone[measure])
        n += 1
    return float(area + unused + (0.0 if worth.weight[measure] > 0.0 else ms.tail))  # W may run to the end


@uncounted
def _add_memory_while_away(
    area: float, state: State, remaining: Remaining, i: int, measure: int, device: OneStage
) -> float:
    """Add ms of all the memory that an activation needs until its input gradient."""
    row, lines, worth, ms = state.row, state.lines, device.worth, device.ms
    parts, wait = state.activations[i, PARTS], state.activations[i, READY] - row[NOW]
    if row[OP] == FORWARD and i == int(row[ACTIVATIONS]) - 1:
        area += remaining.op_ms * worth.forward[measure]
        wait -= remaining.op_ms
    if parts == device.parts and not _is_moving(state, i):
        area += wait * worth.present[measure, device.parts]
    elif parts >= 0.0:
        there = int(parts)  # parts that it may be left with, but for one that is coming back
        for line in range(2):
            if lines[line, DIRECTION] != 0.0 and lines[line, WHOSE] == i:
                there += 1 if lines[line, DIRECTION] == BACK else -1
        for k in range(there, device.parts):
            area += worth.present[measure, k + 1] * ms.reload
    elif parts == CHECKPOINT:
        area += max(0.0, wait - ms.recompute) * worth.checkpoint[measure] + ms.recompute * worth.recompute[measure]
    return float(area)
