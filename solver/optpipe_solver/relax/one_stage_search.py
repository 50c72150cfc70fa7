"""Best-first search over what a device with one stage can do: ops and transfers start, and time goes on; and the least
end of what begins with a state. Compiled; tests compare it with a plain one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optpipe.evaluate.jit import compiled, compiled_part
from optpipe_solver.relax.one_stage import (
    BACK,
    BACKWARD,
    BYTES,
    CHECKPOINT,
    DIRECTION,
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
    WIDTH,
    OneStage,
    StageState,
    bytes_held,
    has_same_ops,
    is_complete,
    is_moving,
)
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


@compiled
def expand(device: OneStage, room: tuple[StageState, ...], states: States, pops: int) -> float:
    """Take the best state and put in its place those that follow from it, `pops` times or until one is complete.

    Two streams, compute and the link, each start an op or wait for the next event: the end of what runs elsewhere, or
    that an input gradient may start. So every schedule that starts its ops as soon as its order allows is among those
    that follow.

    Activations with equally many parts there are interchangeable. So only one of them is tried: to leave, the one that
    began last; to come back or to have its B, the one that began first. An activation may leave more than once, and
    also after it was computed again: both only make the least end earlier. A BW is B followed at once by W, with the
    least bytes of both. `room` is for states to work on.

    A state's bound is at least that of the one before it: after the last B, a state no longer has the tail.
    After `tally[IS_FULL]` the search must not go on, as the state that had no room is gone.

    Returns
    -------
    The least end in ms: no schedule's is below; that of the complete state if there is one (`tally[IS_COMPLETE]`).
    """
    state = room[0]
    if states.tally[ROWS] == 0:
        add_unless_dominated(state.row, FIRST_ACTIVATION, False, end_bound(state, device), states)
    for _ in range(pops):
        if is_over(states):
            break
        least = read_best(states, state.row)
        if is_complete(state, device):
            states.tally[IS_COMPLETE] = 1
            break
        remove_best(states)
        if state.row[STARTED] < device.microbatches and int(state.row[IN_FLIGHT]) == len(state.activations):
            states.tally[IS_FULL] = 1
            return least
        _add_successors(room, device, states, least)
        if states.tally[IS_FULL]:
            return least
    return least_bound(states)


@compiled_part
def _add_successors(
    room: tuple[StageState, ...],
    device: OneStage,
    states: States,
    least: float,
) -> None:
    """Add what follows from the first state with each op on compute and each transfer on each line; the others are to
    work on."""
    state, computing, sending, following = room
    held = bytes_held(state, device)
    for op in range(6):
        copy_columns(state.row, computing.row)
        with_op = start_op(computing, op, device, held)
        if with_op == IMPOSSIBLE:
            continue
        transfers = 1 + 2 * int(computing.row[IN_FLIGHT])  # none, or of an activation out or back
        for first in range(transfers if device.lines else 1):
            copy_columns(computing.row, sending.row)
            with_first = start_transfer(sending, 0, first, device, with_op)
            if with_first == IMPOSSIBLE:
                continue
            for second in range(transfers if device.lines == 2 else 1):
                copy_columns(sending.row, following.row)
                if start_transfer(following, 1, second, device, with_first) == IMPOSSIBLE:
                    continue
                if not go_to_next_event(following, device):
                    continue
                only_waited = op == IDLE and first + second == 0 and has_same_ops(state, following)
                end = max(least, end_bound(following, device))
                width = FIRST_ACTIVATION + WIDTH * int(following.row[IN_FLIGHT])
                add_unless_dominated(following.row, width, only_waited, end, states)
                if states.tally[IS_FULL]:
                    return


# What can start now. Each function returns the bytes that are held then, or IMPOSSIBLE.


@compiled_part
def start_op(state: StageState, op: int, device: OneStage, held: int) -> int:
    """Start an op on compute, or nothing."""
    if op == IDLE:
        return held
    if state.row[OP] != IDLE:
        return IMPOSSIBLE
    if op == WEIGHT:
        if state.row[WAITING_FOR_W] == 0.0:
            return IMPOSSIBLE
        _run(state, WEIGHT, device.ms.weight)
        state.row[WAITING_FOR_W] -= 1.0
        held += device.memory.weight - device.memory.waiting
    elif op == BACKWARD:
        held = _start_backward(state, device, held)
    elif op == RECOMPUTE:
        held = _start_recompute(state, device, held)
    else:
        held = _start_forward(state, op, device, held)
    state.row[BYTES] = held
    return held if held <= device.memory.budget else IMPOSSIBLE


@compiled_part
def _run(state: StageState, op: int, ms: float) -> None:
    state.row[OP], state.row[OP_ENDS] = op, state.row[NOW] + ms


@compiled_part
def _start_forward(state: StageState, op: int, device: OneStage, held: int) -> int:
    row, activations, ms = state.row, state.activations, device.ms
    will_be_recomputed = op == FORWARD_THEN_RECOMPUTE
    if row[STARTED] == device.microbatches or (will_be_recomputed and not device.can_recompute):
        return IMPOSSIBLE
    _run(state, FORWARD, ms.forward)
    row[STARTED] += 1.0
    i = int(row[IN_FLIGHT])
    row[IN_FLIGHT] += 1.0
    activations[i, READY] = row[OP_ENDS] + ms.between
    activations[i, PARTS] = CHECKPOINT if will_be_recomputed else device.parts
    return held + device.memory.forward


@compiled_part
def _start_recompute(state: StageState, device: OneStage, held: int) -> int:
    """Compute the first activation again that has only its checkpoint."""
    for i in range(int(state.row[IN_FLIGHT])):
        if state.activations[i, PARTS] == CHECKPOINT:
            _run(state, RECOMPUTE, device.ms.recompute)
            state.activations[i, PARTS] = RECOMPUTING
            return held + device.memory.recompute - device.memory.checkpoint
    return IMPOSSIBLE


@compiled_part
def _start_backward(state: StageState, device: OneStage, held: int) -> int:
    """Start the input gradient of the first activation that is ready and there as a whole."""
    now, activations = state.row[NOW], state.activations
    for i in range(int(state.row[IN_FLIGHT])):
        is_ready = activations[i, READY] <= now and activations[i, PARTS] == device.parts
        if is_ready and not is_moving(state, i):
            _run(state, BACKWARD, device.ms.backward)
            _remove_activation(state, i)
            return held + device.memory.backward - int(device.memory.present[device.parts])
    return IMPOSSIBLE


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
def start_transfer(state: StageState, line: int, choice: int, device: OneStage, held: int) -> int:
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
def go_to_next_event(state: StageState, device: OneStage) -> bool:
    """Go to the next event. False if there is none."""
    event = _next_event(state)
    if event == np.inf:
        return False
    _end_op(state, event, device)
    _end_transfers(state, event)
    state.row[NOW] = event
    for i in range(int(state.row[IN_FLIGHT])):  # states that differ only in the past are equal
        state.activations[i, READY] = max(state.activations[i, READY], event)
    _sort_equally_ready(state)
    return True


@compiled_part
def _next_event(state: StageState) -> float:
    """When the op on compute or a transfer ends or, with compute idle, an input gradient may start."""
    row, lines, activations, event = state.row, state.lines, state.activations, np.inf
    count, now = int(row[IN_FLIGHT]), row[NOW]
    if row[OP] != IDLE:
        event = row[OP_ENDS]
    else:
        for i in range(count):
            if activations[i, READY] > now:
                event = min(event, activations[i, READY])
    for line in range(2):
        if lines[line, DIRECTION] != 0.0:
            event = min(event, lines[line, ENDS])
    return float(event)


@compiled_part
def _end_op(state: StageState, event: float, device: OneStage) -> None:
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
def _end_transfers(state: StageState, event: float) -> None:
    lines = state.lines
    for line in range(2):
        if lines[line, DIRECTION] != 0.0 and lines[line, ENDS] <= event:
            change = 1.0 if lines[line, DIRECTION] == BACK else -1.0
            state.activations[int(lines[line, WHOSE]), PARTS] += change
            lines[line, ENDS] = lines[line, DIRECTION] = lines[line, WHOSE] = 0.0


@compiled_part
def _sort_equally_ready(state: StageState) -> None:
    """Sort activations that are ready at the same time, most parts first; the one whose forward runs stays the last."""
    row, activations, count = state.row, state.activations, int(state.row[IN_FLIGHT])
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


@compiled_part
def _swap_transfers(state: StageState, i: int, j: int) -> None:
    """Let lines that carry a part of one of two activations carry one of the other."""
    lines = state.lines
    for line in range(2):
        if lines[line, DIRECTION] != 0.0:
            if lines[line, WHOSE] == j:
                lines[line, WHOSE] = i
            elif lines[line, WHOSE] == i:
                lines[line, WHOSE] = j


# The least end of every schedule that begins like a state


class Remaining(NamedTuple):
    """What is left to do in a state.

    Attributes
    ----------
    forwards, backwards
        Micro-batches that have not begun; input gradients to start.
    op_ms
        Of the op that runs.
    compute_ms
        Of the op that runs, of whatever kind, and of F, B and C to come.
    weight_ms
        Of W to come.
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


@compiled_part
def end_bound(state: StageState, device: OneStage) -> float:
    """No schedule that begins like this ends before this time; each may end later.

    By compute, by the way of each micro-batch, by link and memory.
    """
    remaining = _remaining(state, device)
    now = state.row[NOW]
    end = _end_by_paths(state, remaining, device)
    end = max(end, now + remaining.compute_ms + remaining.weight_ms)
    if remaining.backwards == 0.0:
        return float(end)
    end = max(end, now + remaining.compute_ms + device.ms.tail)
    for measure in range(len(device.fractions.forward)):
        end = max(end, _end_by_memory(state, remaining, measure, end, device))
    return float(end)


@compiled_part
def _remaining(state: StageState, device: OneStage) -> Remaining:
    row, lines, activations, ms = state.row, state.lines, state.activations, device.ms
    now, count, forwards = row[NOW], int(row[IN_FLIGHT]), device.microbatches - row[STARTED]
    recompute_ms, parts_to_return, whole = 0.0, 0.0, forwards
    for i in range(count):
        parts = activations[i, PARTS]
        if parts == CHECKPOINT:
            recompute_ms += ms.recompute
        elif parts >= 0.0:
            parts_to_return += device.parts - parts
            whole += parts == device.parts
    out_ms, back_ms = 0.0, 0.0
    for line in range(2):
        if lines[line, DIRECTION] == OUT:
            out_ms += lines[line, ENDS] - now
            parts_to_return += 1.0
        elif lines[line, DIRECTION] == BACK:
            back_ms += lines[line, ENDS] - now
            parts_to_return -= 1.0
    op_ms = max(0.0, row[OP_ENDS] - now) if row[OP] != IDLE else 0.0
    backwards = forwards + count
    compute_ms = forwards * ms.forward + backwards * ms.backward + recompute_ms + op_ms
    weight_ms = (backwards + row[WAITING_FOR_W]) * ms.weight + (ms.weight if row[OP] == BACKWARD else 0.0)
    back_ms += parts_to_return * ms.reload
    return Remaining(forwards, backwards, op_ms, compute_ms, weight_ms, out_ms, back_ms, whole)


@compiled_part
def _end_by_paths(state: StageState, remaining: Remaining, device: OneStage) -> float:
    """A bound on the end by the way of each micro-batch alone."""
    row, activations, ms = state.row, state.activations, device.ms
    free, forwards = row[NOW] + remaining.op_ms, remaining.forwards
    end = free + ms.tail if row[OP] == BACKWARD else row[NOW]
    if forwards:
        end = free + forwards * ms.forward + ms.between + ms.backward + ms.tail
    for i in range(int(row[IN_FLIGHT])):
        end = max(end, activations[i, READY] + ms.backward + ms.tail)
    return float(end)


@compiled_part
def _end_by_memory(state: StageState, remaining: Remaining, measure: int, end: float, device: OneStage) -> float:
    """A bound on the end by memory over time, if at least `end`: of the activations that are yet to begin, some are
    computed again; of the others, parts leave as long as that pays."""
    now, ms, fractions = state.row[NOW], device.ms, device.fractions
    need = _memory_needed(state, remaining, measure, device)
    best = np.inf
    for recomputed in range(int(remaining.forwards) + 1 if device.can_recompute else 1):
        memory_ms = need - recomputed * fractions.saved_by_recompute[measure]
        end_by_compute = max(end, now + remaining.compute_ms + remaining.weight_ms + recomputed * ms.recompute)
        sent, level, sent_at_level = 0.0, 0, 0.0  # parts that leave, the first of each activation first
        while end_by_compute < best:
            end_by_line = _end_by_lines(now, sent, remaining, device)
            best = min(best, max(end_by_compute, now + memory_ms, end_by_line))
            if now + memory_ms <= max(end_by_compute, end_by_line) or device.lines == 0 or level == device.parts:
                break
            memory_ms -= fractions.saved_by_part[measure, level]
            sent += 1.0
            sent_at_level += 1.0
            if sent_at_level >= remaining.whole - recomputed:
                level, sent_at_level = level + 1, 0.0
        if end_by_compute >= best:
            break
    return float(best)


@compiled_part
def _end_by_lines(now: float, sent: float, remaining: Remaining, device: OneStage) -> float:
    """A bound on the end by the lines if so many further parts leave and come back."""
    ms = device.ms
    if device.lines == 1:
        line_ms = remaining.out_ms + remaining.back_ms + sent * (ms.offload + ms.reload)
    else:
        line_ms = max(remaining.out_ms + sent * ms.offload, remaining.back_ms + sent * ms.reload)
    return float(now + line_ms + ms.backward + ms.tail if line_ms > 0.0 else now)


@compiled_part
def _memory_needed(state: StageState, remaining: Remaining, measure: int, device: OneStage) -> float:
    """ms of all the memory that are needed from now on by this measure if no further part leaves."""
    op, ms, fractions = state.row[OP], device.ms, device.fractions
    forwards, backwards = remaining.forwards, remaining.backwards
    area = forwards * (ms.forward * fractions.forward[measure] + ms.between * fractions.present[measure, device.parts])
    area += backwards * ms.backward * fractions.backward[measure]
    area += remaining.weight_ms * fractions.weight[measure]
    if op == BACKWARD:
        area += remaining.op_ms * fractions.backward[measure]
    elif op == WEIGHT:
        area += remaining.op_ms * fractions.weight[measure]
    for i in range(int(state.row[IN_FLIGHT])):
        area += _area_before_backward(state, remaining, i, measure, device)
    unused, n = 0.0, 1  # while the n-th last input gradient runs, n activations are there at most, its own included
    while n < backwards and n * fractions.most[measure] < 1.0:
        unused += ms.backward * (1.0 - n * fractions.most[measure])
        n += 1
    # W may hold memory to the end; where it does not count, the memory is empty in the tail.
    return float(area + unused + (0.0 if fractions.weight[measure] > 0.0 else ms.tail))


@compiled_part
def _area_before_backward(state: StageState, remaining: Remaining, i: int, measure: int, device: OneStage) -> float:
    """Memory over time that an activation in flight needs until its B, in ms of the whole budget."""
    row, lines, fractions, ms = state.row, state.lines, device.fractions, device.ms
    parts, wait, area = state.activations[i, PARTS], state.activations[i, READY] - row[NOW], 0.0
    if row[OP] == FORWARD and i == int(row[IN_FLIGHT]) - 1:
        area += remaining.op_ms * fractions.forward[measure]
        wait -= remaining.op_ms
    if parts == device.parts and not is_moving(state, i):
        area += wait * fractions.present[measure, device.parts]
    elif parts >= 0.0:
        there = int(parts)  # once running transfers have ended; each further part has to come back
        for line in range(2):
            if lines[line, DIRECTION] != 0.0 and lines[line, WHOSE] == i:
                there += 1 if lines[line, DIRECTION] == BACK else -1
        for k in range(there, device.parts):
            area += fractions.present[measure, k + 1] * ms.reload
    elif parts == CHECKPOINT:
        area += (
            max(0.0, wait - ms.recompute) * fractions.checkpoint[measure] + ms.recompute * fractions.recompute[measure]
        )
    return float(area)
