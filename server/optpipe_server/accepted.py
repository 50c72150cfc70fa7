"""Sizes of problems that the service accepts, and the schedules that clients send for them."""

from __future__ import annotations

from optpipe.errors import InputError
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, ScheduleFile

MOST_STAGES = 256
MOST_MICROBATCHES = 4096
MOST_PARTS = 2**18  # of activations (`count_parts`): about 600 MiB and 6 s for a schedule with all its ops
LARGE = 2**15  # activation parts: a schedule of a larger problem takes seconds and much memory


def count_parts(problem: Problem) -> int:
    """Count the activation parts as if every stage had as many as that with the most: time and memory to make or verify
    a schedule grow with them."""
    return len(problem.stages) * problem.microbatches * max(stage.offload_parts for stage in problem.stages)


def require_parts(problem: Problem, what: str, most: int) -> None:
    """Raise `InputError` if memory and time of an answer, which grow with the parts, would be too much."""
    if (parts := count_parts(problem)) > most:
        raise InputError(
            f"{what} has {parts} activation parts (stages times micro-batches times the largest offload_parts): "
            f"expected up to {most} here"
        )


def read_schedule(file: ScheduleFile, problem: Problem, placed: bool = True) -> Schedule:
    """Return the schedule of a document for this problem, or where `placed` for the document's placement of it.

    Raises `InputError` for an op that cannot be read, or a placement that does not suit the problem.
    """
    placement = file.placement if placed else None
    problem = placement.apply(problem) if placement else problem
    if len(problem.stages) > MOST_STAGES:
        raise InputError(f"schedule.placement makes {len(problem.stages)} stages: expected up to {MOST_STAGES} here")
    require_parts(problem, "schedule.placement: the problem on its stages", MOST_PARTS)
    return Schedule.parse(problem, (device.program for device in file.devices), file.links, file.method, placement)
