"""What the forms of other stacks have in common: routes that they can express, and one order of all ops."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from optpipe.errors import InputError, ScheduleError
from optpipe.evaluate.validity import complaints
from optpipe.model.arrays import Ints
from optpipe.model.ops import BACKWARD, Kind, Op, Pair
from optpipe.model.problem import Problem
from optpipe.model.program import KIND, MICROBATCH, STAGE
from optpipe.schedule import Schedule

OFFLOAD = (Kind.O, Kind.D, Kind.R)
WAYS = {Kind.F: "F"} | dict.fromkeys(BACKWARD, "B")  # the letter of the message that an op gets, and of what it sends


def require_one_route(problem: Problem, where: str) -> None:
    """Raises InputError, about the stack `where`, unless micro-batches pass all stages in order, on all devices."""
    row = tuple(range(len(problem.stages)))
    if other := [route for route in problem.all_routes if route != row]:
        raise InputError(
            f"routes: one is {list(other[0])}: in {where} every micro-batch passes all stages in order, 0 to {row[-1]}"
        )
    if idle := set(range(len(problem.devices))) - {stage.device for stage in problem.stages}:
        raise InputError(f"device {min(idle)} has no stage: in {where} every rank has one")


def require_runnable(schedule: Schedule) -> None:
    """Raises ScheduleError if the schedule cannot run. Whether it fits the memory does not matter."""
    if wrong := complaints(schedule.problem, schedule.links, schedule.compiled.rows, schedule.compiled.index):
        raise ScheduleError(wrong[0])


def receiver(op: Op, stages: int) -> int | None:
    """The stage that gets what an op sends; None if it sends nothing."""
    if op.kind not in WAYS:
        return None
    to = op.stage + (1 if op.kind == Kind.F else -1)
    return to if 0 <= to < stages else None


def forwards_of(schedule: Schedule, stage: int) -> Ints:
    """(m,) the micro-batches in the order in which a stage computes them."""
    table = schedule.programs[schedule.problem.stages[stage].device].table
    order: Ints = table[(table[:, KIND] == Kind.F) & (table[:, STAGE] == stage), MICROBATCH]
    return order


def numbered_as_computed(schedule: Schedule, stage: int, reader: str) -> Schedule:
    """The schedule with its micro-batches numbered in the order of a stage's forwards.

    Equal micro-batches change names, and the schedule stays the same. Raises InputError if others would have to;
    `reader` names who takes the j-th one for number j, and as what.
    """
    order, alike = forwards_of(schedule, stage), schedule.problem.costs.class_of
    differs = np.flatnonzero(alike[order] != alike)
    if differs.size:
        k = int(differs[0])
        raise InputError(
            f"stage {stage} computes micro-batch {order[k]} where {reader} {k}, and the two differ: number the "
            "micro-batches in the order in which that stage computes them (Problem.entering)"
        )
    return schedule.renumbered(schedule.problem, np.argsort(order))


def hint(op: Op) -> str:
    """What a sentence about an op that a form cannot express ends with."""
    return "; --without-offload (in Python without_offload=True) leaves offloads out" if op.kind in OFFLOAD else ""


def in_one_order(schedule: Schedule) -> Iterator[tuple[int, Op | Pair]]:
    """Each op or pair with its device: all of them in the order of their predicted ends, in which none comes before
    what it waits for (`CompiledSchedule.places`), and each device's in the order of its program.

    If a message is sent behind its op, and its receive posted at that place of the order, sends and receives of two
    ranks have the same order on both, and nothing waits in a circle, whatever the ops' times.
    """
    table, places = schedule.compiled.rows, schedule.compiled.places
    issued = np.maximum.accumulate(np.where(table.transfer, 0, np.arange(len(table))))  # the op before a transfer
    for row in np.lexsort((np.arange(len(table)), places[issued])).tolist():
        if not table.second[row]:  # which stands right behind its first in this order, too
            yield int(table.device[row]), table.item(row)
