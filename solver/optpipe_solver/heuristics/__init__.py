"""Heuristics: schedules in milliseconds, for every problem. `STREAMS` goes on to better and better ones."""

from __future__ import annotations

from optpipe.evaluate.objective import Objective, length_ms
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_solver import plan
from optpipe_solver.heuristics.generators import STREAMS

__all__ = ["STREAMS", "generate"]


def generate(method: str, problem: Problem, objective: Objective = "makespan") -> Schedule:
    """Return a heuristic's best schedule with little effort."""
    passes = len(problem.stages) * problem.microbatches
    tries = min(plan.GENERATE_TRIES, max(2, plan.GENERATE_OPS // (3 * passes)))
    schedules = [schedule for schedule, _ in zip(STREAMS[method](problem, objective), range(tries), strict=False)]
    return min(schedules, key=lambda schedule: length_ms(schedule, objective))
