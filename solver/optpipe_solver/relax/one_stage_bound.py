"""A lower bound on the end of every schedule that begins like a state of the search over a device with one stage."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optpipe.evaluate.jit import compiled_part
from optpipe_solver.relax.one_stage import (
    BACK,
    BACKWARD,
    CHECKPOINT,
    DIRECTION,
    ENDS,
    FORWARD,
    IDLE,
    IN_FLIGHT,
    OP,
    OP_ENDS,
    OUT,
    PARTS,
    READY,
    STARTED,
    WAITING_FOR_W,
    WEIGHT,
    WHOSE,
    OneStage,
    StageState,
    is_moving,
)
from optpipe_solver.relax.states import NOW


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
