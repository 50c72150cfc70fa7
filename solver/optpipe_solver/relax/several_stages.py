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
from optpipe.model.problem import Problem
from optpipe_solver import tuning
from optpipe_solver.bounds.problem_facts import shortest_paths, stage_bytes
from optpipe_solver.bounds.ramp import Steps, done_by, idle_before_end, steps_on
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


class SeveralStages(NamedTuple):
    """A device that each micro-batch passes on c stages.

    A micro-batch has 2c ops here, its steps: forwards on the way there, input gradients on the way back.
    """

    microbatches: int  # that pass it
    step_ms: Floats  # (2c,) of each step
    gap_ms: Floats  # (2c,) from the end of each step to the start of the next at least; after the last one to the end
    rest_ms: Floats  # (2c,) from the start of each step to the end at least
    done_ms: Floats  # (2c + 1,) of a micro-batch's steps before each, and the weight gradients that follow these
    before_end: Floats  # (n, 2) ms before the end, and how long compute is idle from then on
    horizons: Floats  # (n, 2) ms from now on, and the price of a byte then, in ms
    weights: WeightGradients
    memory: StepBytes


def several_stages_device(
    problem: Problem, j: int, stages: list[int], microbatches: int, objective: Objective
) -> SeveralStages:
    """Return the device that so many micro-batches, all like micro-batch j, pass on these stages in this order."""
    c, paths, bytes_of = len(stages), shortest_paths(problem), stage_bytes(problem, j)
    held, d = [bytes_of[s] for s in stages], problem.stages[stages[0]].device
    (steps,) = steps_on(problem, d, paths, objective)
    budget = problem.devices[d].activation_budget_bytes
    before_end = idle_before_end([steps], budget)
    between = np.diff(steps.begins_ms) - steps.ms[:-1]
    gap_ms = np.maximum(0.0, [*between, steps.to_end_ms[-1] - steps.ms[-1]])

    gradients = list(zip(steps.weight_ms.tolist(), [each.waiting for each in held[::-1]], strict=True))
    groups = sorted({gradient for gradient in gradients if gradient[0] > 0.0})
    group = [-1] * c + [groups.index(gradient) if gradient in groups else -1 for gradient in gradients]
    beside = [each.forward - each.stays for each in held] + [each.backward for each in held[::-1]]
    return SeveralStages(
        microbatches=microbatches,
        step_ms=steps.ms,
        gap_ms=gap_ms,
        rest_ms=steps.to_end_ms,
        done_ms=steps.done_ms,
        before_end=before_end[: int(before_end[:, 1].argmax()) + 1],
        horizons=_horizons(steps, budget),
        weights=WeightGradients(
            ms=np.array([ms for ms, _ in groups]),
            waiting_bytes=np.array([size for _, size in groups], dtype=np.int64),
            group=np.array(group, dtype=np.int64),
        ),
        memory=StepBytes(budget, steps.held, np.array(beside, dtype=np.int64)),
    )


def _horizons(steps: Steps, budget: int) -> Floats:
    """From any state on these are looked at, at the price that limits what can be done from the start."""
    prices = np.array([0.0, *steps.prices])
    first = steps._replace(begins_ms=steps.begins_ms - steps.begins_ms[0])
    each_ms = np.array(tuning.RELAX_HORIZONS) * steps.to_end_ms[0]
    return np.array([(ms, prices[done_by([first], budget, ms, prices).argmin()]) for ms in each_ms])


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
    left_ms, last = _left(state, device), len(device.before_end) - 1
    end = max(end, now + left_ms)
    for k in range(last + 1):
        if device.before_end[k, 0] <= left_ms:
            end = max(end, now + left_ms + device.before_end[k, 1])
    for k in range(len(device.horizons)):
        until = device.horizons[k, 0]
        if until <= left_ms:
            idle = until - _most_work(state, device, until, device.horizons[k, 1])
            end = max(end, now + left_ms + idle)
            if until + device.before_end[last, 0] <= left_ms:
                end = max(end, now + left_ms + idle + device.before_end[last, 1])
    return float(end)


@compiled_part
def _most_work(state: StepsState, device: SeveralStages, until: float, price: float) -> float:
    """ms that can be computed in the next `until` ms at most, as in `ramp_bound`."""
    work = price * device.memory.budget
    for g in range(len(state.waiting)):
        work += state.waiting[g] * device.weights.ms[g]
    for i in range(int(state.row[UNDER_WAY])):
        ready_ms = state.microbatches[i, READY] - state.row[NOW]
        work += _worth(int(state.microbatches[i, STEP]), ready_ms, device, until, price)
    for i in range(int(device.microbatches - state.row[STARTED])):
        if i * device.step_ms[0] >= until:
            break
        work += _worth(0, i * device.step_ms[0], device, until, price)
    return work


@compiled_part
def _worth(step: int, at: float, device: SeveralStages, until: float, price: float) -> float:
    """The most that steps from this one on, which may start `at` ms from now, are worth: their ms less what is held."""
    best, k = -price * device.memory.held[step], step
    while k < len(device.step_ms) and at < until:
        at += device.step_ms[k] + device.gap_ms[k]
        k += 1
        best = max(best, device.done_ms[k] - device.done_ms[step] - price * device.memory.held[k])
    return float(best)


@compiled_part
def _left(state: StepsState, device: SeveralStages) -> float:
    """ms that are left to compute."""
    whole = device.done_ms[-1]
    left = (device.microbatches - state.row[STARTED]) * whole
    for i in range(int(state.row[UNDER_WAY])):
        left += whole - device.done_ms[int(state.microbatches[i, STEP])]
    for g in range(len(state.waiting)):
        left += state.waiting[g] * device.weights.ms[g]
    return float(left)
