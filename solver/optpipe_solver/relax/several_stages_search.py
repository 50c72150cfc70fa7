"""Best-first search over what a device with several stages can do, where all activations stay on it. Compiled; tests
compare it with a plain one.

States are only those moments at which compute is free.
"""

from __future__ import annotations

import numpy as np

from optpipe.evaluate.jit import compiled, compiled_part
from optpipe_solver.relax.several_stages import (
    READY,
    STARTED,
    STEP,
    UNDER_WAY,
    SeveralStages,
    StepsState,
    bytes_held,
    is_complete,
    width,
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
def expand(device: SeveralStages, room: tuple[StepsState, ...], states: States, pops: int) -> float:
    """Take the best state and put in its place those that follow from it, `pops` times or until one is complete.

    Compute runs an op, or waits until one may start. Of micro-batches before the same step the one that can have it
    first has it first: their further ways can be exchanged. `room` is for states to work on.

    Returns
    -------
    The least end in ms: no schedule's is below; that of the complete state if there is one (`tally[IS_COMPLETE]`).
    """
    state, following = room
    if states.tally[ROWS] == 0:
        add_unless_dominated(state.row, width(state), False, end_bound(state, device), states)
    for _ in range(pops):
        if is_over(states):
            break
        least = read_best(states, state.row)
        if is_complete(state, device):
            states.tally[IS_COMPLETE] = 1
            break
        remove_best(states)
        if state.row[STARTED] < device.microbatches and int(state.row[UNDER_WAY]) == len(state.microbatches):
            states.tally[IS_FULL] = 1
            return least
        _add_successors(state, following, device, states, least)
        if states.tally[IS_FULL]:
            return least
    return least_bound(states)


@compiled_part
def _add_successors(
    state: StepsState, following: StepsState, device: SeveralStages, states: States, least: float
) -> None:
    """Add what follows from a state if compute waits, runs a weight gradient of a group, or a step."""
    held, groups = bytes_held(state, device), len(state.waiting)
    for choice in range(-1 - groups, len(device.step_ms)):
        copy_columns(state.row, following.row)
        waits = choice < -groups
        if choice >= 0:
            is_possible = _run_step(following, choice, device, held)
        elif waits:
            is_possible = _wait(following)
        else:
            group = choice + groups
            is_possible = following.waiting[group] > 0.0
            following.waiting[group] -= 1.0
            following.row[NOW] += device.weights.ms[group]
        if is_possible:
            now = following.row[NOW]
            for i in range(int(following.row[UNDER_WAY])):  # states that differ only in the past are equal
                following.microbatches[i, READY] = max(following.microbatches[i, READY], now)
            end = max(least, end_bound(following, device))
            add_unless_dominated(following.row, width(following), waits, end, states)
            if states.tally[IS_FULL]:
                return


@compiled_part
def _run_step(state: StepsState, step: int, device: SeveralStages, held: int) -> bool:
    """Run a step of the micro-batch that can have it first. False if none can now, or it does not fit."""
    row, memory = state.row, device.memory
    if step == 0:
        if row[STARTED] == device.microbatches:
            return False
        row[STARTED] += 1.0
    elif not _remove_first_before(state, step):
        return False
    if held - memory.held[step] + memory.held[step + 1] + memory.beside[step] > memory.budget:
        return False
    row[NOW] += device.step_ms[step]
    group = device.weights.group[step]
    if group >= 0:
        state.waiting[group] += 1.0
    if step + 1 < len(device.step_ms):
        _insert(state, row[NOW] + device.gap_ms[step], step + 1)
    return True


@compiled_part
def _remove_first_before(state: StepsState, step: int) -> bool:
    """Remove the first micro-batch before this step from those under way. False if there is none that is ready."""
    row, microbatches = state.row, state.microbatches
    last, place = int(row[UNDER_WAY]) - 1, 0
    while place <= last and microbatches[place, STEP] < step:
        place += 1
    if place > last or microbatches[place, STEP] > step or microbatches[place, READY] > row[NOW]:
        return False
    for i in range(place, last):
        microbatches[i, READY], microbatches[i, STEP] = microbatches[i + 1, READY], microbatches[i + 1, STEP]
    microbatches[last, READY] = microbatches[last, STEP] = 0.0
    row[UNDER_WAY] -= 1.0
    return True


@compiled_part
def _insert(state: StepsState, ready: float, step: int) -> None:
    """Add a micro-batch to those under way, in its place."""
    microbatches, place = state.microbatches, int(state.row[UNDER_WAY])
    while place and (
        microbatches[place - 1, STEP] > step
        or (microbatches[place - 1, STEP] == step and microbatches[place - 1, READY] > ready)
    ):
        microbatches[place, READY], microbatches[place, STEP] = (
            microbatches[place - 1, READY],
            microbatches[place - 1, STEP],
        )
        place -= 1
    microbatches[place, READY], microbatches[place, STEP] = ready, step
    state.row[UNDER_WAY] += 1.0


@compiled_part
def _wait(state: StepsState) -> bool:
    """Go to the next moment at which a step may start. False if there is none."""
    event = np.inf
    for i in range(int(state.row[UNDER_WAY])):
        if state.microbatches[i, READY] > state.row[NOW]:
            event = min(event, state.microbatches[i, READY])
    state.row[NOW] = event
    return bool(event < np.inf)


@compiled_part
def end_bound(state: StepsState, device: SeveralStages) -> float:
    """No schedule that begins like this ends sooner: by compute, by the way of each micro-batch, by memory."""
    now = state.row[NOW]
    steps_ms, weight_ms, backwards = _remaining(state, device)
    end = max(_end_by_paths(state, device), now + steps_ms + weight_ms)
    if backwards == 0.0:
        return float(end)
    end = max(end, now + steps_ms + device.gap_ms[-1])
    for measure in range(len(device.fractions.between)):
        end = max(end, now + _memory_needed(state, backwards, measure, device))
    return float(end)


@compiled_part
def _remaining(state: StepsState, device: SeveralStages) -> tuple[float, float, float]:
    """ms of steps and of weight gradients that are left, and input gradients to start."""
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
    return steps_ms, weight_ms, backwards


@compiled_part
def _end_by_paths(state: StepsState, device: SeveralStages) -> float:
    """The least end by the way of each micro-batch alone."""
    now, to_come = state.row[NOW], device.microbatches - state.row[STARTED]
    end = now + (to_come - 1.0) * device.step_ms[0] + device.rest_ms[0] if to_come else now
    for i in range(int(state.row[UNDER_WAY])):
        end = max(end, state.microbatches[i, READY] + device.rest_ms[int(state.microbatches[i, STEP])])
    return float(end)


@compiled_part
def _memory_needed(state: StepsState, backwards: float, measure: int, device: SeveralStages) -> float:
    """ms of all the memory that are needed from now on, by this measure."""
    now, fractions = state.row[NOW], device.fractions
    area, weight_counts = (device.microbatches - state.row[STARTED]) * fractions.area[measure, 0], False
    for i in range(int(state.row[UNDER_WAY])):
        step = int(state.microbatches[i, STEP])
        area += (state.microbatches[i, READY] - now) * fractions.between[measure, step] + fractions.area[measure, step]
    for g in range(len(state.waiting)):
        area += state.waiting[g] * device.weights.ms[g] * fractions.weight[measure, g]
        weight_counts = weight_counts or fractions.weight[measure, g] > 0.0
    if not weight_counts:
        n = 1.0  # while the n-th last input gradient runs, n activations are there at most, its own included
        while n < backwards and n * fractions.most[measure] < 1.0:
            area += device.shortest_backward_ms * (1.0 - n * fractions.most[measure])
            n += 1.0
        area += device.gap_ms[-1]
    return float(area)
