"""`OneStage`: the only device with limits, which micro-batches pass on one stage, as the compiled search needs it; and
`StageState`: a state of that search, and what its columns are."""

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
from optpipe_solver.bounds.paths import shortest_paths, shortest_times
from optpipe_solver.bounds.stage_bytes import LevelBytes, StageBytes, stage_bytes

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
# here.
READY, PARTS = 0, 1
WIDTH = 2

# What compute can start; a forward whose activation is to be computed again runs as FORWARD.
IDLE, FORWARD, FORWARD_THEN_RECOMPUTE, BACKWARD, RECOMPUTE, WEIGHT = range(6)
OUT, BACK = 1, 2  # directions of a transfer; 0: none
# In place of the parts of an activation that are there: it is to be computed again, or is being computed.
CHECKPOINT, RECOMPUTING = -1, -2
IMPOSSIBLE = -1  # in place of the bytes that are held


class Durations(NamedTuple):
    """ms of each op; a transfer's is that of one part.

    Attributes
    ----------
    between
        The least time from the end of a micro-batch's F to the start of its B.
    tail
        The least time from the end of the last B to the end of all or, for the span, of this device.
    """

    forward: float
    backward: float
    weight: float
    recompute: float
    offload: float
    reload: float
    between: float
    tail: float


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

    Attributes
    ----------
    forward, recompute, backward, weight
        (measures,) of an activation while that op runs.
    checkpoint
        (measures,) between F and C.
    most
        (measures,) the most that one activation holds; 1 if any that wait for their W can fill what the others leave.
    present
        (measures, parts + 1) of an activation with that many parts on the device.
    saved_by_part
        (measures, parts) memory over time saved by each further part of an activation that leaves, falling.
    saved_by_recompute
        (measures,) likewise for an activation that is computed again.
    """

    forward: Floats
    recompute: Floats
    backward: Floats
    weight: Floats
    checkpoint: Floats
    most: Floats
    present: Floats
    saved_by_part: Floats
    saved_by_recompute: Floats


class OneStage(NamedTuple):
    """A device with one stage; all others only take time.

    Attributes
    ----------
    microbatches
        That pass it.
    parts
        In which an activation may leave; 0 if it cannot.
    lines
        streams of the host link: 0 if nothing leaves, 1 where one carries both directions, else 2.
    can_recompute
        Whether activations may be computed again.
    """

    microbatches: int
    parts: int
    lines: int
    can_recompute: bool
    ms: Durations
    memory: ActivationBytes
    fractions: BudgetFractions


def one_stage_device(problem: Problem, j: int, s: int, microbatches: int, objective: Objective) -> OneStage:
    """Return the device of stage s, which so many micro-batches pass, all like micro-batch j."""
    held, stage = stage_bytes(problem, j)[s], problem.stages[s]
    ms, again = _durations(problem, j, s, objective), _again(held)
    budget = problem.devices[stage.device].activation_budget_bytes
    part_bytes = sorted(held.parts, reverse=True) if stage.can_offload else []
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
        fractions=_budget_fractions(measures(budget, [held]), held, present, ms, can_recompute=stage.can_recompute),
    )


def _again(held: StageBytes) -> LevelBytes:
    """The bytes by the only level; where there is none they are not read."""
    return held.levels[0] if held.levels else LevelBytes(0, 0, 0, [])


def _durations(problem: Problem, j: int, s: int, objective: Objective) -> Durations:
    paths, times = shortest_paths(problem), shortest_times(problem, j)
    ms = {kind: float(times[kind, s]) for kind in (Kind.F, Kind.B, Kind.W, Kind.O, Kind.R)}
    return Durations(
        forward=ms[Kind.F],
        backward=ms[Kind.B],
        weight=ms[Kind.W],
        recompute=float(problem.costs.levels.recompute_ms[:, s, j].max(initial=0.0)),
        offload=ms[Kind.O],
        reload=ms[Kind.R],
        between=max(0.0, float(paths.round_trip[j, s]) - (ms[Kind.F] + ms[Kind.B])),
        tail=float(paths.after[j, s]) if objective == "makespan" else ms[Kind.W],
    )


def _budget_fractions(
    each: list[Measure], held: StageBytes, present: Ints, ms: Durations, *, can_recompute: bool
) -> BudgetFractions:
    """By each measure of sizes; the first one comes twice, at first as if a running W held nothing: then memory is
    surely empty in the tail, which may prove more."""
    parts, transfers_ms, again, rows = len(present) - 1, ms.offload + ms.reload, _again(held), []
    for number, measure in enumerate([each[0], *each]):
        values = [measure(int(size)) for size in present]
        saved_by_parts = [
            values[parts] * ms.between
            - sum(values[parts - i] * transfers_ms for i in range(gone))
            - values[parts - gone] * max(0.0, ms.between - gone * transfers_ms)
            for gone in range(parts + 1)
        ]
        recompute, checkpoint, saved_by_recompute = measure(again.recompute), measure(again.checkpoint), 0.0
        if can_recompute:
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
    steps: list[float] = []
    at = 0
    while at < len(total) - 1:
        slope, to = max(((total[k] - total[at]) / (k - at), k) for k in range(at + 1, len(total)))
        steps += [max(0.0, slope)] * (to - at)
        at = to
    return steps


class StageState(NamedTuple):
    """A state as named arrays over one row of numbers.

    Attributes
    ----------
    row
        All columns.
    lines
        (2, 3) what each line to the host carries.
    activations
        (most, 2) the activations in flight, in the order of READY.
    """

    row: Floats
    lines: Floats
    activations: Floats


def empty_state(microbatches: int) -> StageState:
    columns = FIRST_ACTIVATION + WIDTH * min(microbatches, MOST_ACTIVATIONS)
    row = np.zeros(columns)
    activations = row[FIRST_ACTIVATION:].reshape((columns - FIRST_ACTIVATION) // WIDTH, WIDTH)
    return StageState(row, row[LINES:IN_FLIGHT].reshape(2, 3), activations)


def must_equal(microbatches: int) -> Flags:
    """Return the mask of the columns that must be equal for one state to dominate another."""
    mask = np.zeros(len(empty_state(microbatches).row), dtype=bool)
    mask[[OP, STARTED, IN_FLIGHT]] = True
    mask[LINES:IN_FLIGHT].reshape(2, 3)[:, [DIRECTION, WHOSE]] = True
    mask[FIRST_ACTIVATION:].reshape(-1, WIDTH)[:, PARTS] = True
    return mask


@compiled_part
def is_complete(state: StageState, device: OneStage) -> bool:
    row = state.row
    if row[STARTED] < device.microbatches or row[OP] != IDLE:
        return False
    return bool(row[IN_FLIGHT] == 0.0 and row[WAITING_FOR_W] == 0.0)


@compiled_part
def has_same_ops(a: StageState, b: StageState) -> bool:
    """Whether the same ops run in both."""
    same_transfers = a.lines[0, DIRECTION] == b.lines[0, DIRECTION] and a.lines[1, DIRECTION] == b.lines[1, DIRECTION]
    return bool(a.row[OP] == b.row[OP] and same_transfers)


@compiled_part
def bytes_held(state: StageState, device: OneStage) -> int:
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


@compiled_part
def is_moving(state: StageState, i: int) -> bool:
    """Whether a part of an activation is on a line."""
    lines, moves = state.lines, False
    for line in range(2):
        moves = moves or (lines[line, DIRECTION] != 0.0 and lines[line, WHOSE] == i)
    return moves
