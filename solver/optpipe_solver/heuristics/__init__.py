"""Heuristics: schedules in milliseconds, for every problem. `GENERATORS` by name; `STREAMS` go on to better ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from optpipe.model.problem import Problem
from optpipe.process.child import Objective
from optpipe.schedule import Schedule
from optpipe_solver.heuristics.descent import value
from optpipe_solver.heuristics.generators import STREAMS

__all__ = ["GENERATORS", "STREAMS", "generate", "value"]

ENOUGH = 30_000  # compute ops handled, about half a second, before `generate` settles for the best so far
TRIES = 50  # likewise, of small schedules


def generate(method: str, problem: Problem, objective: Objective = "makespan") -> Schedule:
    """A heuristic's best schedule with little effort."""
    tries = min(TRIES, max(2, ENOUGH // (3 * len(problem.stages) * problem.microbatches)))
    found = [schedule for schedule, _ in zip(STREAMS[method](problem, objective), range(tries), strict=False)]
    return min(found, key=lambda schedule: value(schedule, objective))


GENERATORS: dict[str, Callable[[Problem], Schedule]] = {name: partial(generate, name) for name in STREAMS}
