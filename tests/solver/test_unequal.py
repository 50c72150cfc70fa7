"""Micro-batches that differ: all that finds or bounds schedules, against every schedule there is.

`python -m pytest tests/solver/test_unequal.py -m soak --hypothesis-show-statistics` tries thousands of problems, in
half an hour, and says how often a bound is the optimum.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import inf

import pytest
from hypothesis import Phase, event, find, given, reject, settings
from hypothesis import strategies as st
from support.bounds import bounds_of, cpsat_finds, read_frames
from support.enumeration import TooManyError, best_of_all, length
from support.examples import examples
from support.milp import Solver, solver_process
from support.small_problems import unequal_and_tiny

from optpipe import Problem, certify, check
from optpipe.evaluate.objective import Objective
from optpipe.process.protocol import Note
from optpipe.reuse.by_rules import by_rules
from optpipe.steps import StepScheduler
from optpipe_solver.bounds.least_memory import infeasibility
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.milp import ENGINE as MILP

OBJECTIVES: tuple[Objective, ...] = ("makespan", "span")
NOISE = 1e-6  # ms


@pytest.fixture(scope="module")
def milp() -> Iterator[Solver]:
    with solver_process() as running:
        yield running


def all_agree_with_every_schedule(problem: Problem, objective: Objective, milp: Solver) -> None:
    try:
        best_ms, _ = best_of_all(problem, objective)
    except TooManyError:
        reject()
    if best_ms == inf:
        event("no schedule fits")
        return
    assert infeasibility(problem) is None
    told = bounds_of(problem, objective)
    event(f"the optimum is {'' if max(told.values()) >= best_ms - NOISE else 'not '}proven without CP-SAT and MILP")
    schedules, told["cpsat"] = cpsat_finds(problem, objective, 5.0)
    assert length(schedules[-1], objective) == pytest.approx(best_ms, abs=NOISE)
    frames = milp.frames(problem, objective=objective)
    of_milp, told["milp"] = read_frames(problem, frames)
    given_up = any("is no bound" in frame.text for frame in frames if isinstance(frame, Note))
    if MILP.unsupported(problem) is None and not given_up:
        assert length(of_milp[-1], objective) == pytest.approx(best_ms, abs=NOISE)
    assert {name: ms for name, ms in told.items() if ms > best_ms + NOISE} == {}
    event(f"the optimum is {'' if max(told.values()) >= best_ms - NOISE else 'not '}proven by one of all")
    listed = [each for name in ("adaoffload", "naive") for each in islice(STREAMS[name](problem, objective), 3)]
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


@settings(max_examples=examples(10), deadline=None)
@given(problem=unequal_and_tiny(), objective=st.sampled_from(OBJECTIVES))
def test_what_enumeration_leaves_out_is_no_better(problem: Problem, objective: Objective) -> None:
    try:
        best_ms, _ = best_of_all(problem, objective, all_of_them=True)
    except TooManyError:
        reject()
    assert best_of_all(problem, objective)[0] == best_ms


def test_a_bound_that_is_too_high_by_2_percent_is_seen() -> None:
    def is_seen(problem: Problem) -> bool:
        try:
            best_ms, _ = best_of_all(problem, "makespan")
        except TooManyError:
            return False
        return best_ms < inf and 1.02 * max(bounds_of(problem, "makespan").values()) > best_ms + NOISE

    find(unequal_and_tiny(), is_seen, settings=settings(max_examples=50, phases=[Phase.generate]))
