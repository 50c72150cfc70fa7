"""Published schedules on other stages than the problem's own: whether one is shorter than a search's answer."""

from __future__ import annotations

import time
from contextlib import suppress

from optpipe.errors import OptPipeError
from optpipe.evaluate.objective import Objective, length_ms, shorter
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, check
from optpipe_solver.systems import SYSTEMS, in_best_order


def shorter_on_other_stages(problem: Problem, objective: Objective, best_ms: float, until: float) -> str | None:
    """Return a sentence on the shortest published schedule on other stages that fits and takes less than `best_ms`.

    None if there is none among those made until a moment of `time.monotonic`. The bounds of the problem's own stages do
    not hold for it.
    """
    shortest: Schedule | None = None
    shortest_ms = best_ms
    for name, system in SYSTEMS.items():
        if time.monotonic() > until:
            break
        with suppress(OptPipeError):  # it is not for this problem, or its schedule cannot run
            if system.placement(problem, "all") is None:
                continue
            schedule = in_best_order(name, problem, "all", objective)
            ms = length_ms(schedule, objective)
            if shorter(ms, shortest_ms) and not check(schedule.problem, schedule):
                shortest, shortest_ms = schedule, ms
    if shortest is None:
        return None
    less = 1 - shortest_ms / best_ms
    return f"on other stages {shortest.method} takes {shortest_ms:.6g} ms, {less:.1%} less, with {shortest.placement}"
