"""The least end of what begins with a state of a device with several stages."""

from __future__ import annotations

from typing import NamedTuple

from optpipe.evaluate.jit import compiled_part_in_place
from optpipe_solver.relax.several_stages import SeveralStages
from optpipe_solver.relax.several_stages_state import READY, STARTED, STEP, UNDER_WAY, State
from optpipe_solver.relax.states import NOW


class Remaining(NamedTuple):
    """What is left to do in a state: ms of steps and of weight gradients; input gradients to start."""

    steps_ms: float
    weight_ms: float
    backwards: float


@compiled_part_in_place
def end_bound(state: State, device: SeveralStages) -> float:
    """No schedule that begins like this ends sooner: by compute, by the way of each micro-batch, by memory."""
    now, remaining = state.row[NOW], _remaining(state, device)
    end = max(_end_by_paths(state, device), now + remaining.steps_ms + remaining.weight_ms)
    if remaining.backwards == 0.0:
        return float(end)
    end = max(end, now + remaining.steps_ms + device.gap_ms[-1])
    for measure in range(len(device.shares.between)):
        end = max(end, now + _memory_needed(state, remaining, measure, device))
    return float(end)


@compiled_part_in_place
def _remaining(state: State, device: SeveralStages) -> Remaining:
    steps, to_come, weights = len(device.step_ms), device.microbatches - state.row[STARTED], device.weights
    half = steps // 2
    steps_ms, weight_ms, backwards = to_come * device.work_ms[0], 0.0, to_come * half
    for i in range(int(state.row[UNDER_WAY])):
        step = int(state.microbatches[i, STEP])
        steps_ms += device.work_ms[step]
        backwards += steps - max(step, half)
        for later in range(max(step, half), steps):
            weight_ms += weights.ms[weights.group[later]] if weights.group[later] >= 0 else 0.0
    for step in range(half, steps):
        weight_ms += to_come * weights.ms[weights.group[step]] if weights.group[step] >= 0 else 0.0
    for g in range(len(weights.ms)):
        weight_ms += state.waiting[g] * weights.ms[g]
    return Remaining(steps_ms, weight_ms, backwards)


@compiled_part_in_place
def _end_by_paths(state: State, device: SeveralStages) -> float:
    """The least end by the way of each micro-batch alone."""
    now, to_come = state.row[NOW], device.microbatches - state.row[STARTED]
    end = now + (to_come - 1.0) * device.step_ms[0] + device.rest_ms[0] if to_come else now
    for i in range(int(state.row[UNDER_WAY])):
        end = max(end, state.microbatches[i, READY] + device.rest_ms[int(state.microbatches[i, STEP])])
    return float(end)


@compiled_part_in_place
def _memory_needed(state: State, remaining: Remaining, measure: int, device: SeveralStages) -> float:
    """ms of all the memory that are needed from now on, by this measure."""
    now, shares = state.row[NOW], device.shares
    area, weight_counts = (device.microbatches - state.row[STARTED]) * shares.area[measure, 0], False
    for i in range(int(state.row[UNDER_WAY])):
        step = int(state.microbatches[i, STEP])
        area += (state.microbatches[i, READY] - now) * shares.between[measure, step] + shares.area[measure, step]
    for g in range(len(state.waiting)):
        area += state.waiting[g] * device.weights.ms[g] * shares.weight[measure, g]
        weight_counts = weight_counts or shares.weight[measure, g] > 0.0
    if not weight_counts:
        n = 1.0  # while the n-th last input gradient runs, n activations are there at most, its own included
        while n < remaining.backwards and n * shares.most[measure] < 1.0:
            area += device.shortest_backward_ms * (1.0 - n * shares.most[measure])
            n += 1.0
        area += device.gap_ms[-1]
    return float(area)
