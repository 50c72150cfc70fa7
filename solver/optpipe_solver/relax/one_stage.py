"""`OneStage`: the only device with limits, which micro-batches pass on one stage; the states of its search; and the
least end of what begins with one. Compiled; tests compare the search with a plain one."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np

from optpipe.evaluate.jit import compiled_part
from optpipe.evaluate.objective import Objective
from optpipe.model.arrays import Flags, Floats, Ints
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe_solver.bounds.length import Measure, measures
from optpipe_solver.bounds.problem_facts import LevelBytes, StageBytes, shortest_paths, shortest_times, stage_bytes
from optpipe_solver.relax.states import NOW

MOST_ACTIVATIONS = 128  # before their B; a search ends where there would be more

# Columns of a state after NOW, the first
OP_ENDS = 1  # when the op on compute ends
OP = 2  # which op that is
STARTED = 3  # forwards
WAITING_FOR_W = 4  # activations after their B
LINES = 5  # the first column of `StageState.lines`
IN_FLIGHT = 11  # activations before their B
BYTES = 12  # held until the op on compute ends
FIRST_ACTIVATION = 13  # the first column of `StageState.activations`
# Columns of `StageState.lines`: when the transfer on it ends, its direction, and whose part it carries.
ENDS, DIRECTION, WHOSE = 0, 1, 2
# Columns of `StageState.activations`: when its B may start if the activation is here by then; how many of its parts are
# here. With meetings, two more of those whose input gradient is the k-th to come, k = 1, 2, ...: when the k-th forward
# of the activations in flight began, and when that input gradient may start.
READY, PARTS = 0, 1
BEGAN, DUE = 2, 3

# What compute can start; a forward whose activation is to be computed again runs as FORWARD.
IDLE, FORWARD, FORWARD_THEN_RECOMPUTE, BACKWARD, RECOMPUTE, WEIGHT = range(6)
OUT, BACK = 1, 2  # directions of a transfer; 0: none
# In place of the parts of an activation that are there: it is to be computed again, or is being computed.
CHECKPOINT, RECOMPUTING = -1, -2
IMPOSSIBLE = -1  # in place of the bytes that are held


class Durations(NamedTuple):
    """ms of each op; a transfer's is that of one part."""

    forward: float
    backward: float
    weight: float
    recompute: float
    offload: float
    reload: float
    between: float  # the least time from the end of a micro-batch's F to the start of its B
    tail: float  # the least time from the end of the last B to the end of all or, for the span, of this device


class ActivationBytes(NamedTuple):
    """Bytes: the budget, and what one activation holds."""

    budget: int
    forward: int  # while F runs
    checkpoint: int  # between F and C, if it is recomputed
    recompute: int  # while C runs
    backward: int  # while B runs
    waiting: int  # between B and W
    weight: int  # while W runs
    present: Ints  # (parts + 1,) between F and B, by how many of its parts are on the device


class BudgetFractions(NamedTuple):
    """Fractions of the budget, by several measures (dual feasible functions), a row or value each.

    Memory over time is in ms: 1 ms is the whole budget for 1 ms.
    """

    forward: Floats  # (measures,) of an activation while that op runs; likewise the next three
    recompute: Floats
    backward: Floats
    weight: Floats
    checkpoint: Floats  # (measures,) between F and C
    most: Floats  # (measures,) the most that one activation holds; 1 if any that wait for W can fill what others leave
    present: Floats  # (measures, parts + 1) of an activation with that many parts on the device
    saved_by_part: Floats  # (measures, parts) memory over time saved by each further part that leaves, falling
    saved_by_recompute: Floats  # (measures,) likewise for an activation that is computed again


class OneStage(NamedTuple):
    """A device with one stage; all others only take time."""

    microbatches: int  # that pass it
    parts: int  # in which an activation may leave; 0 if it cannot
    lines: int  # streams of the host link: 0 if nothing leaves, 1 where one carries both directions, else 2
    can_recompute: bool  # whether activations may be computed again
    ms: Durations
    memory: ActivationBytes
    fractions: BudgetFractions
    meetings: Floats  # (stages, 2) `meetings`; (0, 2) where they do not count


def meetings(problem: Problem, j: int, s: int) -> Floats:
    """(stages, 2) of two micro-batches that are under way at once and pass each other after each stage from s on: from
    the later one's forward to the end of the earlier one's input gradient at s, in ms at least, and from the earlier
    one's forward to the end of the later one's input gradient (`device_bounds` has the argument)."""
    paths, times, route = shortest_paths(problem), shortest_times(problem, j), problem.route(j)
    trips = [paths.round_trip[j, at] for at in route[route.index(s) :]]
    ops = [float(times[Kind.F, at] + times[Kind.B, at]) for at in route[route.index(s) :]]
    first = [trips[0] - trip + both for trip, both in zip(trips, ops, strict=True)]
    return np.array(list(zip(first, [trips[0] + trip for trip in (*trips[1:], -trips[0])], strict=True)))


def one_stage_device(problem: Problem, j: int, s: int, microbatches: int, objective: Objective) -> OneStage:
    """Return the device of stage s, which so many micro-batches pass, all like micro-batch j."""
    paths, times, stage = shortest_paths(problem), shortest_times(problem, j), problem.stages[s]
    op_ms = {kind: float(times[kind, s]) for kind in (Kind.F, Kind.B, Kind.W, Kind.O, Kind.R)}
    ms = Durations(
        forward=op_ms[Kind.F],
        backward=op_ms[Kind.B],
        weight=op_ms[Kind.W],
        recompute=float(problem.costs.levels.recompute_ms[:, s, j].max(initial=0.0)),
        offload=op_ms[Kind.O],
        reload=op_ms[Kind.R],
        between=max(0.0, float(paths.round_trip[j, s]) - (op_ms[Kind.F] + op_ms[Kind.B])),
        tail=float(paths.after[j, s]) if objective == "makespan" else op_ms[Kind.W],
    )
    held = stage_bytes(problem, j)[s]
    again = held.levels[0] if held.levels else LevelBytes(0, 0, 0, [])  # of the only level; zeros if there is none
    budget = problem.devices[stage.device].activation_budget_bytes
    part_bytes = sorted(held.parts, reverse=True)
    # The largest parts leave first: no other choice of parts holds less.
    present = np.array([held.stays - gone for gone in accumulate(part_bytes, initial=0)][::-1], dtype=np.int64)
    return OneStage(
        microbatches=microbatches,
        parts=len(part_bytes),
        lines=(1 if problem.transfer_mode == "half_duplex" else 2) if stage.can_offload else 0,
        can_recompute=stage.can_recompute,
        ms=ms,
        memory=ActivationBytes(
            budget=budget,
            forward=held.forward,
            checkpoint=again.checkpoint,
            recompute=again.recompute,
            backward=held.backward,
            waiting=held.waiting,
            weight=held.weight,
            present=present,
        ),
        fractions=_budget_fractions([each.held for each in measures(budget, [held])], held, present, ms, again),
        meetings=np.zeros((0, 2)),
    )


def _budget_fractions(
    each: list[Measure], held: StageBytes, present: Ints, ms: Durations, again: LevelBytes
) -> BudgetFractions:
    """By each measure of sizes; the first one comes twice, at first as if a running W held nothing: then memory is
    surely empty in the tail, which may prove more."""
    parts, transfers_ms, rows = len(present) - 1, ms.offload + ms.reload, []
    for number, measure in enumerate([each[0], *each]):
        values = [measure(int(size)) for size in present]
        saved_by_parts = [
            values[parts] * ms.between
            - sum(values[parts - i] * transfers_ms for i in range(gone))
            - values[parts - gone] * max(0.0, ms.between - gone * transfers_ms)
            for gone in range(parts + 1)
        ]
        recompute, checkpoint = measure(again.recompute), measure(again.checkpoint)
        kept_ms = max(0.0, ms.between - ms.recompute)
        saved_by_recompute = values[parts] * ms.between - recompute * ms.recompute - checkpoint * kept_ms
        rows.append(
            {
                "forward": measure(held.forward),
                "recompute": recompute,
                "backward": measure(held.backward),
                "weight": measure(held.weight) if number > 0 else 0.0,
                "checkpoint": checkpoint,
                "most": 1.0 if measure(max(held.waiting, held.weight)) else measure(held.most),
                "present": values,
                "saved_by_part": _concave_steps(saved_by_parts),
                "saved_by_recompute": max(0.0, saved_by_recompute),
            }
        )
    return BudgetFractions(**{name: np.array([row[name] for row in rows]) for name in BudgetFractions._fields})


def _concave_steps(total: list[float]) -> list[float]:
    """The steps of the least concave function above these totals, from 0 on; none is negative."""
    steps, at = list[float](), 0
    while at < len(total) - 1:
        slope, to = max(((total[k] - total[at]) / (k - at), k) for k in range(at + 1, len(total)))
        steps += [max(0.0, slope)] * (to - at)
        at = to
    return steps


class StageState(NamedTuple):
    """A state as named arrays over one row of numbers."""

    row: Floats  # all columns
    lines: Floats  # (2, 3) what each line to the host carries
    activations: Floats  # (most, 2), with meetings (most, 4): the activations in flight, in the order of READY


def empty_state(device: OneStage) -> StageState:
    most, width = min(device.microbatches, MOST_ACTIVATIONS), 4 if len(device.meetings) else 2
    row = np.zeros(FIRST_ACTIVATION + most * width)
    return StageState(row, row[LINES:IN_FLIGHT].reshape(2, 3), row[FIRST_ACTIVATION:].reshape(most, width))


def must_equal(device: OneStage) -> Flags:
    """Return the mask of the columns that must be equal for one state to dominate another."""
    state = empty_state(device)
    mask = np.zeros(len(state.row), dtype=bool)
    mask[[OP, STARTED, IN_FLIGHT]] = True
    mask[LINES:IN_FLIGHT].reshape(2, 3)[:, [DIRECTION, WHOSE]] = True
    mask[FIRST_ACTIVATION:].reshape(state.activations.shape)[:, PARTS] = True
    return mask


@compiled_part
def is_moving(state: StageState, i: int) -> bool:
    """Whether a part of an activation is on a line."""
    lines, moves = state.lines, False
    for line in range(2):
        moves = moves or (lines[line, DIRECTION] != 0.0 and lines[line, WHOSE] == i)
    return moves


# The least end of every schedule that begins like a state


class Remaining(NamedTuple):
    """What is left to do in a state."""

    forwards: float  # micro-batches that have not begun
    backwards: float  # input gradients to start
    op_ms: float  # of the op that runs
    compute_ms: float  # of the op that runs, of whatever kind, and of F, B and C to come
    weight_ms: float  # of W to come
    out_ms: float  # of the link: transfers that run out
    back_ms: float  # likewise of those that run back, and parts that have to come back
    whole: float  # activations of which all parts can still leave, those to come included


@compiled_part
def end_bound(state: StageState, device: OneStage) -> float:
    """No schedule that begins like this ends sooner: by the way of each micro-batch, by compute, by link and memory."""
    row, activations, ms = state.row, state.activations, device.ms
    now, remaining = row[NOW], _remaining(state, device)
    free, forwards = now + remaining.op_ms, remaining.forwards
    end = free + ms.tail if row[OP] == BACKWARD else now
    if forwards:
        end = free + forwards * ms.forward + ms.between + ms.backward + ms.tail
    for i in range(int(row[IN_FLIGHT])):
        end = max(end, activations[i, READY] + ms.backward + ms.tail)
        if len(device.meetings):
            end = max(end, activations[i, DUE] + ms.backward + ms.tail)
    end = max(end, now + remaining.compute_ms + remaining.weight_ms)
    if remaining.backwards == 0.0:
        return float(end)
    end = max(end, now + remaining.compute_ms + ms.tail)
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
