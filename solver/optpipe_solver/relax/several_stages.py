"""Best-first search over what a device with several stages can do, where all activations stay on it and all other
devices only take time. Compiled; tests compare it with a plain one.

States are only those moments at which compute is free.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optpipe.evaluate.jit import compiled, compiled_part
from optpipe.evaluate.objective import Objective
from optpipe.model.arrays import Flags, Floats, Ints
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe_solver.bounds.length import Measure, measures
from optpipe_solver.bounds.problem_facts import StageBytes, shortest_paths, shortest_times, stage_bytes
from optpipe_solver.relax.states import (
    HEAPED,
    IS_COMPLETE,
    IS_FULL,
    NOW,
    ROWS,
    States,
    add_unless_dominated,
    copy_columns,
    least_bound,
    read_best,
    remove_best,
)

MOST_UNDER_WAY = 128  # micro-batches that a state distinguishes

# Columns of a state after NOW: micro-batches that have started, and how many of them are between two steps.
STARTED, UNDER_WAY, WAITING = 1, 2, 3
# Columns of `StepsState.microbatches`: when its next step may start, and which step that is.
READY, STEP = 0, 1
WIDTH = 2


class WeightGradients(NamedTuple):
    """Weight gradients of equal length and size are one group."""

    ms: Floats  # (groups,) of one weight gradient
    waiting_bytes: Ints  # (groups,) of one activation between its input gradient and its weight gradient
    group: Ints  # (2c,) of the weight gradient that follows each step; -1 if none does


class StepBytes(NamedTuple):
    """What micro-batches hold by their steps."""

    budget: int  # of the device
    held: Ints  # (2c + 1,) by a micro-batch before each step, and after the last
    beside: Ints  # (2c,) by a step while it runs, beside what its micro-batch holds after it


class StepFractions(NamedTuple):
    """Fractions of the budget, by several measures (dual feasible functions). Memory over time is in ms: 1 ms is the
    whole budget for 1 ms."""

    between: Floats  # (measures, 2c + 1) that a micro-batch holds before each step, and after the last
    # (measures, 2c + 1) memory over time of a micro-batch from the start of each step on; weight gradients count while
    # they run, not while they wait.
    area: Floats
    weight: Floats  # (measures, groups) that a weight gradient holds while it runs
    most: Floats  # (measures,) the most that one activation holds up to the end of its input gradient


class SeveralStages(NamedTuple):
    """A device that each micro-batch passes on c stages. A micro-batch has 2c ops here, its steps: forwards on the way
    there, input gradients on the way back."""

    microbatches: int  # that pass it
    step_ms: Floats  # (2c,) of each step
    gap_ms: Floats  # (2c,) from the end of each step to the start of the next at least; after the last one to the end
    rest_ms: Floats  # (2c,) from the start of each step to the end at least
    work_ms: Floats  # (2c,) of a micro-batch's steps from this one on
    shortest_backward_ms: float
    weights: WeightGradients
    memory: StepBytes
    fractions: StepFractions


class _Group(NamedTuple):
    """Equal weight gradients."""

    ms: float  # of one
    waiting_bytes: int  # of an activation that waits for it
    running_bytes: int  # while it runs


def several_stages_device(
    problem: Problem, j: int, stages: list[int], microbatches: int, objective: Objective
) -> SeveralStages:
    """Return the device that so many micro-batches, all like micro-batch j, pass on these stages in this order."""
    c, paths, times, bytes_of = (
        len(stages),
        shortest_paths(problem),
        shortest_times(problem, j),
        stage_bytes(problem, j),
    )
    held = [bytes_of[s] for s in stages]
    step_ms = np.array([*times[Kind.F, stages], *times[Kind.B, stages[::-1]]])

    # What a micro-batch that waits for nothing takes between the device's steps.
    round_trip = np.array([paths.round_trip[j, s] for s in stages])  # from the start of its F to the end of its B
    reaches = np.array([paths.reaches[j, s] for s in stages])  # until its F can start
    there = np.diff(reaches) - step_ms[: c - 1]
    turn = round_trip[-1] - step_ms[c - 1] - step_ms[c]
    back = (-np.diff(round_trip) - np.diff(reaches))[::-1] - step_ms[c + 1 :]  # from the end of one B to the next one's
    tail = paths.after[j, stages[0]] if objective == "makespan" else times[Kind.W, stages[0]]
    gap_ms = np.maximum(0.0, [*there, turn, *back, tail])

    gradients = [_Group(float(times[Kind.W, s]), bytes_of[s].waiting, bytes_of[s].weight) for s in stages]
    groups = sorted({gradient for gradient in gradients if gradient.ms > 0.0})
    group = [-1] * c + [groups.index(gradient) if gradient in groups else -1 for gradient in gradients[::-1]]
    beside = [each.forward - each.stays for each in held] + [each.backward for each in held[::-1]]
    budget = problem.devices[problem.stages[stages[0]].device].activation_budget_bytes
    # (2c + 1, c) whether the activation of each stage is there before a step: from the end of its forward, step k, to
    # the start of its backward, step 2c - 1 - k.
    present = np.array([[k < step <= 2 * c - 1 - k for k in range(c)] for step in range(2 * c + 1)], dtype=np.int64)
    return SeveralStages(
        microbatches=microbatches,
        step_ms=step_ms,
        gap_ms=gap_ms,
        rest_ms=np.cumsum((step_ms + gap_ms)[::-1])[::-1],
        work_ms=np.cumsum(step_ms[::-1])[::-1],
        shortest_backward_ms=float(step_ms[c:].min()),
        weights=WeightGradients(
            ms=np.array([gradient.ms for gradient in groups]),
            waiting_bytes=np.array([gradient.waiting_bytes for gradient in groups], dtype=np.int64),
            group=np.array(group, dtype=np.int64),
        ),
        memory=StepBytes(budget, present @ np.array([each.stays for each in held]), np.array(beside, dtype=np.int64)),
        fractions=_step_fractions(measures(budget, held), held, present, step_ms, gap_ms, groups, group),
    )


def _step_fractions(
    each: list[Measure],
    held: list[StageBytes],
    present: Ints,
    step_ms: Floats,
    gap_ms: Floats,
    groups: list[_Group],
    group: list[int],
) -> StepFractions:
    """By each measure of sizes; the first one comes twice, at first as if a running W held nothing."""
    rows = []
    for number, measure in enumerate([each[0], *each]):
        between = present @ [measure(stage.stays) for stage in held]
        forward = [measure(stage.forward) - measure(stage.stays) for stage in held]
        beside = np.array([*forward, *(measure(stage.backward) for stage in held[::-1])])
        weight = np.array([measure(each.running_bytes) if number else 0.0 for each in groups])
        step = step_ms * (beside + between[1:]) + gap_ms * between[1:]
        step += [weight[g] * groups[g].ms if g >= 0 else 0.0 for g in group]
        most = max(measure(max(stage.forward, stage.stays, stage.backward)) for stage in held)
        rows.append((between, np.array([*np.cumsum(step[::-1])[::-1], 0.0]), weight, most))
    return StepFractions(*map(np.array, zip(*rows, strict=True)))


class StepsState(NamedTuple):
    """A state as named arrays over one row of numbers."""

    row: Floats  # all columns
    waiting: Floats  # (groups,) weight gradients that wait
    microbatches: Floats  # (most, 2) those under way, in the order of their steps, then of READY


def empty_state(device: SeveralStages) -> StepsState:
    first, most = WAITING + len(device.weights.ms), min(device.microbatches, MOST_UNDER_WAY)
    row = np.zeros(first + WIDTH * most)
    return StepsState(row, row[WAITING:first], row[first:].reshape(most, WIDTH))


def must_equal(device: SeveralStages) -> Flags:
    """Return the mask of the columns that must be equal for one state to dominate another."""
    mask = np.zeros(len(empty_state(device).row), dtype=bool)
    mask[[STARTED, UNDER_WAY]] = True
    mask[WAITING + len(device.weights.ms) :].reshape(-1, WIDTH)[:, STEP] = True
    return mask


@compiled
def expand(device: SeveralStages, room: tuple[StepsState, ...], states: States, pops: int) -> float:
    """Take the best state and put in its place those that follow from it, `pops` times or until one is complete. Return
    the least end in ms: no schedule's is below; that of the complete state if there is one (`tally[IS_COMPLETE]`).

    Compute runs an op, or waits until one may start. Of micro-batches before the same step the one that can have it
    first has it first: their further ways can be exchanged. `room` is for states to work on.
    """
    state, following = room
    if states.tally[ROWS] == 0:
        add_unless_dominated(state.row, _width(state), False, end_bound(state, device), states)
    for _ in range(pops):
        if states.tally[HEAPED] == 0:
            break
        least = read_best(states, state.row)
        if state.row[STARTED] == device.microbatches and state.row[UNDER_WAY] == 0.0 and not state.waiting.any():
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
def _width(state: StepsState) -> int:
    """How many columns the state uses."""
    return len(state.row) - WIDTH * (len(state.microbatches) - int(state.row[UNDER_WAY]))


@compiled_part
def _add_successors(
    state: StepsState, following: StepsState, device: SeveralStages, states: States, least: float
) -> None:
    """Add what follows from a state if compute waits, runs a weight gradient of a group, or a step."""
    groups, held = len(state.waiting), 0  # bytes between ops
    for i in range(int(state.row[UNDER_WAY])):
        held += device.memory.held[int(state.microbatches[i, STEP])]
    for g in range(groups):
        held += device.weights.waiting_bytes[g] * int(state.waiting[g])
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
            add_unless_dominated(following.row, _width(following), waits, end, states)
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
        copy_columns(microbatches[i + 1], microbatches[i])
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
        copy_columns(microbatches[place - 1], microbatches[place])
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
    """No schedule that begins like this ends sooner: by the way of each micro-batch, by compute, by memory."""
    now, to_come = state.row[NOW], device.microbatches - state.row[STARTED]
    end = now + (to_come - 1.0) * device.step_ms[0] + device.rest_ms[0] if to_come else now
    for i in range(int(state.row[UNDER_WAY])):
        end = max(end, state.microbatches[i, READY] + device.rest_ms[int(state.microbatches[i, STEP])])
    steps_ms, weight_ms, backwards = _remaining(state, device)
    end = max(end, now + steps_ms + weight_ms)
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
