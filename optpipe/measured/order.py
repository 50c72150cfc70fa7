"""The order in which the ops of steps ran, as programs, and whether it can be replayed."""

from __future__ import annotations

from optpipe.measured.messages import impossible
from optpipe.measured.recording import MeasuredOp
from optpipe.measured.steps import Step, TrainingSteps
from optpipe.model.ops import Op
from optpipe.model.problem import Problem
from optpipe.model.program import Program
from optpipe.schedule import Schedule


def order_that_ran(training: TrainingSteps, problem: Problem) -> tuple[Schedule | None, list[str]]:
    """The last whole step as a schedule, and why it is not used, or not all of it."""
    why = "the measured order: {}"
    if any(each.start_ms is None for each in training.ops):
        return None, [why.format("not all starts were measured")]
    if reason := impossible(training.steps):
        return None, [why.format(reason)]
    orders = [programs_of(step, len(problem.devices)) for step in training.steps]
    schedule = Schedule(problem, tuple(map(Program.from_items, orders[-1])), method="measured")
    if complaints := schedule.compiled.complaints:
        return None, [why.format(complaints[0])]
    others = sum(order != orders[-1] for order in orders)
    return schedule, [f"the order of {others} of {len(orders)} steps: the last one ran in another"] if others else []


def programs_of(step: Step, devices: int) -> tuple[tuple[Op, ...], ...]:
    """By device, its ops in the order in which they began."""
    ops: list[list[Op]] = [[] for _ in range(devices)]
    for each in sorted(step, key=lambda each: (each.start_ms or 0.0, each.end_ms)):
        ops[each.device].append(each.op)
    return tuple(map(tuple, ops))


def overlapping_ops(step: Step) -> tuple[Op, Op] | None:
    """Two ops of a device one of which began before the other was half over."""
    last: dict[int, MeasuredOp] = {}
    for each in sorted(step, key=lambda each: each.start_ms or 0.0):
        before = last.get(each.device)
        if before and each.start_ms is not None and before.end_ms - each.start_ms > max(before.ms, each.ms) / 2 > 0:
            return before.op, each.op
        last[each.device] = each
    return None
