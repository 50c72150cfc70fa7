"""Every bound against the optimum of small problems: CP-SAT's, and that of all schedules there are."""

from __future__ import annotations

import pytest
from hypothesis import assume, event, given, reject, settings
from hypothesis import strategies as st
from support.bounds import bounds_of, cpsat_finds
from support.enumeration import TooManyError, best_of_all
from support.examples import examples
from support.small_problems import (
    partly_frozen,
    problems_of_every_sort,
    several_a_device,
    short_of_memory,
    tiny,
    unequal_and_tiny,
)

from optpipe import Problem, check
from optpipe.evaluate.objective import Objective, length_ms
from optpipe_solver.bounds.least_memory import infeasibility

OBJECTIVES: tuple[Objective, ...] = ("makespan", "span")
NOISE = 1e-6  # ms
CPSAT_S = 2.0  # of counted work; most of these problems are proven in a tenth of it


def no_bound_is_above_what_cpsat_finds(problem: Problem, objective: Objective) -> None:
    assume(infeasibility(problem) is None)
    schedules, cpsat_ms = cpsat_finds(problem, objective, CPSAT_S)
    assert check(problem, schedules[-1]) == []
    shortest_ms = length_ms(schedules[-1], objective)
    ours = bounds_of(problem, objective)
    assert {name: ms for name, ms in (ours | {"cpsat": cpsat_ms}).items() if ms > shortest_ms + NOISE} == {}
    event(f"the best of them is {'all' if max(ours.values()) >= shortest_ms - NOISE else 'less than'} CP-SAT's length")
    event(f"CP-SAT's length is {'' if cpsat_ms >= shortest_ms - NOISE else 'not '}proven by its own bound")


KINDS = st.one_of(
    short_of_memory(most_microbatches=5),
    several_a_device(most_microbatches=4),
    problems_of_every_sort(),
    partly_frozen(3, 5),
)


@settings(max_examples=examples(25), deadline=None)
@given(problem=KINDS, objective=st.sampled_from(OBJECTIVES))
def test_no_bound_is_above_what_cpsat_finds(problem: Problem, objective: Objective) -> None:
    no_bound_is_above_what_cpsat_finds(problem, objective)


@pytest.mark.soak  # the same on a thousand problems and more
@settings(max_examples=1_500, deadline=None)
@given(problem=KINDS, objective=st.sampled_from(OBJECTIVES))
def test_nor_on_many_problems(problem: Problem, objective: Objective) -> None:
    no_bound_is_above_what_cpsat_finds(problem, objective)


@settings(max_examples=examples(40), deadline=None)
@given(problem=partly_frozen(most_microbatches=2))
def test_no_schedule_is_shorter_where_stages_are_frozen(problem: Problem) -> None:
    no_schedule_is_shorter(problem)


@pytest.mark.soak  # minutes: all schedules of each problem
@settings(max_examples=examples(100), deadline=None)
@given(problem=partly_frozen())
def test_nor_with_more_micro_batches(problem: Problem) -> None:
    no_schedule_is_shorter(problem)


@pytest.mark.soak  # thousands, in minutes
@settings(max_examples=20_000, deadline=None)
@given(problem=st.one_of(tiny(), unequal_and_tiny()))
def test_no_schedule_of_a_tiny_problem_is_shorter(problem: Problem) -> None:
    no_schedule_is_shorter(problem)


def no_schedule_is_shorter(problem: Problem) -> None:
    assume(infeasibility(problem) is None)
    for objective in OBJECTIVES:
        try:
            best_ms, _ = best_of_all(problem, objective)
        except TooManyError:
            reject()
        told = bounds_of(problem, objective)
        assert {name: ms for name, ms in told.items() if ms > best_ms + NOISE} == {}
        event(f"the optimum is {'' if max(told.values()) >= best_ms - NOISE else 'not '}proven")
