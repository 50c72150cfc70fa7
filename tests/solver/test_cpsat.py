"""CP-SAT on the whole problem against every program there is (on tiny problems) and against `check` (on random ones)."""

from __future__ import annotations

import pytest
from support.enumeration import EXHAUSTIVE, RICHER, best_of_all, length

from optpipe import Problem, check
from optpipe.child import Bound, Frame, Incumbent, Objective, Request
from optpipe_solver import cpsat
from optpipe_solver.bounds import memory_bound, trivial_bound

ALL = EXHAUSTIVE | RICHER


def answers(problem: Problem, objective: Objective = "makespan", seconds: float = 60.0, **asked: object) -> list[Frame]:
    frames: list[Frame] = []
    request = {"problem": problem, "method": "cpsat", "objective": objective, "time_limit_s": seconds, **asked}
    cpsat.run(Request.model_validate(request), frames.append)
    return frames


def values(problem: Problem, frames: list[Frame], objective: Objective = "makespan") -> list[float]:
    """Of the incumbents, each checked."""
    schedules = [frame.schedule.schedule(problem, frame.method) for frame in frames if isinstance(frame, Incumbent)]
    assert [check(problem, schedule) for schedule in schedules] == [[]] * len(schedules)
    return [length(schedule, objective) for schedule in schedules]


def bound(problem: Problem, frames: list[Frame], objective: Objective = "makespan") -> float:
    told = [frame.lower_bound_ms for frame in frames if isinstance(frame, Bound)]
    return max([trivial_bound(problem, objective), memory_bound(problem, objective), *told])


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("name", ALL)
def test_the_optimum_is_the_best_of_all_programs(name: str, objective: Objective) -> None:
    problem = ALL[name]
    best, tried = best_of_all(problem, objective)
    frames = answers(problem, objective)
    assert tried > 10
    assert values(problem, frames, objective)[-1] == pytest.approx(best)
    assert bound(problem, frames, objective) == pytest.approx(best)
