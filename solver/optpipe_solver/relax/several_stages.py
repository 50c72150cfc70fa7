"""`SeveralStages`: the only device with limits, which micro-batches pass on several stages, all of whose activations
stay, as the compiled search needs it; and `StepsState`: a state of that search."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optpipe.evaluate.jit import compiled_part
from optpipe.evaluate.objective import Objective
from optpipe.model.arrays import Flags, Floats, Ints
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe_solver.bounds.length import Measure, measures
from optpipe_solver.bounds.paths import shortest_paths, shortest_times
from optpipe_solver.bounds.stage_bytes import StageBytes, stage_bytes

MOST_UNDER_WAY = 128  # micro-batches that a state distinguishes

# Columns of a state after NOW: micro-batches that have started, and how many of them are between two steps.
STARTED, UNDER_WAY, WAITING = 1, 2, 3
# Columns of `StepsState.microbatches`: when its next step may start, and which step that is.
READY, STEP = 0, 1
WIDTH = 2


class WeightGradients(NamedTuple):
    """Weight gradients of equal length and size are one group.

    Attributes
    ----------
    ms
        (groups,) of one weight gradient.
    waiting_bytes
        (groups,) of one activation between its input gradient and its weight gradient.
    group
        (2c,) of the weight gradient that follows each step; -1 if none does.
    """

    ms: Floats
    waiting_bytes: Ints
    group: Ints


class StepBytes(NamedTuple):
    """Bytes.

    Attributes
    ----------
    budget
        Of the device.
    held
        (2c + 1,) that a micro-batch holds before each step, and after the last.
    beside
        (2c,) that a step holds while it runs, beside what its micro-batch holds after it.
    """

    budget: int
    held: Ints
    beside: Ints


class StepFractions(NamedTuple):
    """Fractions of the budget, by several measures (dual feasible functions).

    Attributes
    ----------
    between
        (measures, 2c + 1) that a micro-batch holds before each step, and after the last.
    area
        (measures, 2c + 1) memory over time of a micro-batch from the start of each step on, in ms of the whole budget;
        weight gradients count while they run, not while they wait.
    weight
        (measures, groups) that a weight gradient holds while it runs.
    most
        (measures,) the most that one activation holds up to the end of its input gradient.
    """

    between: Floats
    area: Floats
    weight: Floats
    most: Floats


class SeveralStages(NamedTuple):
    """A device that each micro-batch passes on c stages; all others only take time.

    A micro-batch has 2c ops here, its steps: forwards on the way there, input gradients on the way back.

    Attributes
    ----------
    microbatches
        That pass it.
    step_ms
        (2c,) of each step.
    gap_ms
        (2c,) from the end of each step to the start of the next one at least; after the last one to the end.
    rest_ms
        (2c,) from the start of each step to the end at least.
    work_ms
        (2c,) of a micro-batch's steps from this one on.
    shortest_backward_ms
        Of the shortest input gradient.
    """

    microbatches: int
    step_ms: Floats
    gap_ms: Floats
    rest_ms: Floats
    work_ms: Floats
    shortest_backward_ms: float
    weights: WeightGradients
    memory: StepBytes
    fractions: StepFractions


class _Group(NamedTuple):
    """Equal weight gradients: ms of one, bytes of an activation that waits for it, and bytes while it runs."""

    ms: float
    waiting_bytes: int
    running_bytes: int


def several_stages_device(
    problem: Problem, j: int, stages: list[int], microbatches: int, objective: Objective
) -> SeveralStages:
    """Return the device that so many micro-batches, all like micro-batch j, pass on these stages in this order."""
    c, times, bytes_of = len(stages), shortest_times(problem, j), stage_bytes(problem, j)
    held = [bytes_of[s] for s in stages]
    step_ms = np.array([*times[Kind.F, stages], *times[Kind.B, stages[::-1]]])
    gap_ms = _gaps(problem, j, stages, step_ms, objective)
    gradients = [_Group(float(times[Kind.W, s]), bytes_of[s].waiting, bytes_of[s].weight) for s in stages]
    groups = sorted({gradient for gradient in gradients if gradient.ms > 0.0})
    group = [-1] * c + [groups.index(gradient) if gradient in groups else -1 for gradient in gradients[::-1]]
    beside = [each.forward - each.stays for each in held] + [each.backward for each in held[::-1]]
    budget = problem.devices[problem.stages[stages[0]].device].activation_budget_bytes
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
        memory=StepBytes(
            budget=budget,
            held=_present(c) @ np.array([each.stays for each in held]),
            beside=np.array(beside, dtype=np.int64),
        ),
        fractions=_step_fractions(measures(budget, held), held, step_ms, gap_ms, groups, group),
    )


def _gaps(problem: Problem, j: int, stages: list[int], step_ms: Floats, objective: Objective) -> Floats:
    """Return `gap_ms`: what a micro-batch that waits for nothing takes between the device's steps."""
    paths, c = shortest_paths(problem), len(stages)
    round_trip = np.array([paths.round_trip[j, s] for s in stages])  # from the start of its F to the end of its B
    reaches = np.array([paths.reaches[j, s] for s in stages])  # until its F can start
    there = np.diff(reaches) - step_ms[: c - 1]
    turn = round_trip[-1] - step_ms[c - 1] - step_ms[c]
    back = (-np.diff(round_trip) - np.diff(reaches))[::-1] - step_ms[c + 1 :]  # from the end of one B to the next one's
    tail = paths.after[j, stages[0]] if objective == "makespan" else shortest_times(problem, j)[Kind.W, stages[0]]
    return np.maximum(0.0, [*there, turn, *back, tail])


def _present(c: int) -> Ints:
    """Return (2c + 1, c) whether the activation of each stage is there before a step: from the end of its forward, step
    k, to the start of its backward, step 2c - 1 - k."""
    return np.array([[k < step <= 2 * c - 1 - k for k in range(c)] for step in range(2 * c + 1)], dtype=np.int64)


def _step_fractions(
    each: list[Measure],
    held: list[StageBytes],
    step_ms: Floats,
    gap_ms: Floats,
    groups: list[_Group],
    group: list[int],
) -> StepFractions:
    """By each measure of sizes; the first one comes twice, at first as if a running W held nothing."""
    rows = []
    for number, measure in enumerate([each[0], *each]):
        between = _present(len(held)) @ np.array([measure(stage.stays) for stage in held])
        forward = [measure(stage.forward) - measure(stage.stays) for stage in held]
        beside = np.array([*forward, *(measure(stage.backward) for stage in held[::-1])])
        weight = np.array([measure(each.running_bytes) if number else 0.0 for each in groups])
        step = step_ms * (beside + between[1:]) + gap_ms * between[1:]
        step += [weight[g] * groups[g].ms if g >= 0 else 0.0 for g in group]
        most = max(measure(max(stage.forward, stage.stays, stage.backward)) for stage in held)
        area = np.array([*np.cumsum(step[::-1])[::-1], 0.0])
        rows.append({"between": between, "area": area, "weight": weight, "most": most})
    return StepFractions(**{name: np.array([row[name] for row in rows]) for name in StepFractions._fields})


class StepsState(NamedTuple):
    """A state as named arrays over one row of numbers.

    Attributes
    ----------
    row
        All columns.
    waiting
        (groups,) weight gradients that wait.
    microbatches
        (most, 2) those under way, in the order of their steps, then of READY.
    """

    row: Floats
    waiting: Floats
    microbatches: Floats


def empty_state(device: SeveralStages) -> StepsState:
    first, most = WAITING + len(device.weights.ms), min(device.microbatches, MOST_UNDER_WAY)
    row = np.zeros(first + WIDTH * most)
    return StepsState(row, row[WAITING:first], row[first:].reshape(most, WIDTH))


@compiled_part
def width(state: StepsState) -> int:
    """How many columns the state uses."""
    return len(state.row) - WIDTH * (len(state.microbatches) - int(state.row[UNDER_WAY]))


def must_equal(device: SeveralStages) -> Flags:
    """Return the mask of the columns that must be equal for one state to dominate another."""
    mask = np.zeros(len(empty_state(device).row), dtype=bool)
    mask[[STARTED, UNDER_WAY]] = True
    mask[WAITING + len(device.weights.ms) :].reshape(-1, WIDTH)[:, STEP] = True
    return mask


@compiled_part
def is_complete(state: StepsState, device: SeveralStages) -> bool:
    if state.row[STARTED] < device.microbatches or state.row[UNDER_WAY] > 0.0:
        return False
    waiting = 0.0
    for g in range(len(state.waiting)):
        waiting += state.waiting[g]
    return bool(waiting == 0.0)


@compiled_part
def bytes_held(state: StepsState, device: SeveralStages) -> int:
    """The bytes that are held between ops."""
    held = 0
    for i in range(int(state.row[UNDER_WAY])):
        held += device.memory.held[int(state.microbatches[i, STEP])]
    for g in range(len(state.waiting)):
        held += device.weights.waiting_bytes[g] * int(state.waiting[g])
    return held
