"""Bounds of a problem by their names, and what CP-SAT finds."""

from collections.abc import Sequence

from optpipe import Problem, Schedule
from optpipe.evaluate.objective import Objective
from optpipe.process.protocol import Frame, Request
from optpipe_solver import cpsat
from optpipe_solver.bounds import deferral_bound, memory_bound, ramp_bound, trivial_bound
from optpipe_solver.relax import device_bounds, searchable_devices
from support.frames import bounds, schedules

STATES = 5_000  # of a device


def bounds_of(problem: Problem, objective: Objective) -> dict[str, float]:
    """All bounds that need no schedule."""
    alone = {
        f"relax {d}": max(device_bounds(problem, d, objective, STATES), default=0.0)
        for d in searchable_devices(problem)
    }
    each = {"trivial": trivial_bound, "memory": memory_bound, "deferral": deferral_bound, "ramp": ramp_bound}
    return alone | {name: bound(problem, objective) for name, bound in each.items()}


def read_frames(problem: Problem, frames: Sequence[Frame]) -> tuple[list[Schedule], float]:
    """The schedules, each better than the one before, and the best bound."""
    return schedules(frames, problem), max(bounds(frames), default=0.0)


def cpsat_frames(
    problem: Problem, objective: Objective = "makespan", seconds: float = 60.0, **asked: object
) -> list[Frame]:
    """What CP-SAT emits in seconds of counted work."""
    frames: list[Frame] = []
    request = {"problem": problem, "method": "cpsat", "objective": objective, "time_limit_s": seconds, **asked}
    cpsat.run(Request.model_validate(request), frames.append)
    return frames


def cpsat_finds(problem: Problem, objective: Objective, seconds: float) -> tuple[list[Schedule], float]:
    """The schedules of CP-SAT and its own bound, in seconds of counted work."""
    return read_frames(problem, cpsat_frames(problem, objective, seconds))
