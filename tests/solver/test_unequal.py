"""Micro-batches that differ: all that finds or bounds schedules, against every schedule there is.

`python -m pytest tests/solver/test_unequal.py -m soak` tries thousands of problems, for hours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

import pytest
from hypothesis import event, given, reject, settings
from hypothesis import strategies as st
from support.enumeration import TooManyError, best_of_all, length
from support.examples import examples
from support.milp import Solver, solver_process
from support.small_problems import unequal_and_tiny

from optpipe import Problem, Schedule, certify, check
from optpipe.evaluate.objective import Objective
from optpipe.process.protocol import Bound, Frame, Incumbent, Note, Request
from optpipe.reuse.by_rules import by_rules
from optpipe.steps import StepScheduler
from optpipe_solver import cpsat
from optpipe_solver.bounds import deferral_bound, memory_bound, trivial_bound
from optpipe_solver.bounds.least_memory import infeasibility
from optpipe_solver.heuristics import generate as list_schedule
from optpipe_solver.relax.one_device import device_bounds, searchable_devices

OBJECTIVES: tuple[Objective, ...] = ("makespan", "span")
NOISE = 1e-6  # ms


@pytest.fixture(scope="module")
def milp() -> Iterator[Solver]:
    with solver_process() as running:
        yield running


def bounds_of(problem: Problem, objective: Objective) -> dict[str, float]:
    """By name all that is told without a schedule."""
    alone = {f"relax {d}": max(device_bounds(problem, d, objective), default=0.0) for d in searchable_devices(problem)}
    each = {"trivial": trivial_bound, "memory": memory_bound, "deferral": deferral_bound}
    return alone | {name: bound(problem, objective) for name, bound in each.items()}


def search_whole(problem: Problem, objective: Objective) -> tuple[list[Schedule], float]:
    """The schedules of CP-SAT, and its best bound."""
    frames: list[Frame] = []
    request = Request(problem=problem, method="cpsat", objective=objective, time_limit_s=5.0, threads=1)
    cpsat.ENGINE.run(request, frames.append)
    return read(problem, frames)


def read(problem: Problem, frames: Sequence[Frame]) -> tuple[list[Schedule], float]:
    schedules = [frame.schedule.schedule(problem, "") for frame in frames if isinstance(frame, Incumbent)]
    return schedules, max((frame.lower_bound_ms for frame in frames if isinstance(frame, Bound)), default=0.0)


def all_agree_with_every_schedule(problem: Problem, objective: Objective, milp: Solver) -> None:
    try:
        best_ms, _ = best_of_all(problem, objective)
    except TooManyError:
        reject()
    if best_ms == inf:
        event("no schedule fits")
        return
    event("a schedule fits")
    assert infeasibility(problem) is None
    told = bounds_of(problem, objective)
    schedules, told["cpsat"] = search_whole(problem, objective)
    assert length(schedules[-1], objective) == pytest.approx(best_ms, abs=NOISE)
    frames = milp.frames(problem, objective=objective)
    of_milp, told["milp"] = read(problem, frames)
    if not any("is no bound" in frame.text for frame in frames if isinstance(frame, Note)):
        assert length(of_milp[-1], objective) == pytest.approx(best_ms, abs=NOISE)
    assert {name: ms for name, ms in told.items() if ms > best_ms + NOISE} == {}
    listed = [list_schedule(method, problem, objective) for method in ("adaoffload", "naive")]
    schedules += of_milp + [schedule for schedule in listed if certify(problem, schedule).fits]
    if len(problem.all_routes) == 1:
        by_few_rules = by_rules(problem, None, objective, 20_000)
        schedules += [by_few_rules] if by_few_rules else []
        schedules.append(StepScheduler(problem).plan(problem, improve=False).first)
    for schedule in schedules:
        assert not check(problem, schedule)
        assert length(schedule, objective) >= best_ms - NOISE


@settings(max_examples=examples(8), deadline=None)
@given(problem=unequal_and_tiny(), objective=st.sampled_from(OBJECTIVES))
def test_nothing_is_shorter_than_the_best_of_all(problem: Problem, objective: Objective, milp: Solver) -> None:
    all_agree_with_every_schedule(problem, objective, milp)


@pytest.mark.soak  # the same on thousands of problems
@settings(max_examples=5_000, deadline=None)
@given(problem=unequal_and_tiny(), objective=st.sampled_from(OBJECTIVES))
def test_nor_of_thousands_of_problems(problem: Problem, objective: Objective, milp: Solver) -> None:
    all_agree_with_every_schedule(problem, objective, milp)
