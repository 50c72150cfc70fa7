"""Every bound against the optimum of small problems: CP-SAT's, and that of all schedules there are."""

from __future__ import annotations

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from support.enumeration import best_of_all
from support.examples import examples
from support.small_problems import partly_frozen, problems_of_every_sort, several_a_device, short_of_memory, tiny

from optpipe import Problem, check
from optpipe.evaluate.objective import Objective, length_ms
from optpipe.process.protocol import Bound, Frame, Incumbent, Request
from optpipe_solver import cpsat
from optpipe_solver.bounds import deferral_bound, memory_bound, trivial_bound
from optpipe_solver.bounds.least_memory import infeasibility
from optpipe_solver.relax.one_device import device_bounds, searchable_devices

OBJECTIVES: tuple[Objective, ...] = ("makespan", "span")
STATES = 5_000  # of a device
NOISE = 1e-6  # ms
CPSAT_S = 2.0  # of counted work; most of these problems are proven in a tenth of it


def bounds_of(problem: Problem, objective: Objective) -> dict[str, float]:
    """By name what needs no schedule to be told."""
    alone = {
        f"relax {d}": max(device_bounds(problem, d, objective, STATES), default=0.0)
        for d in searchable_devices(problem)
    }
    each = {"trivial": trivial_bound, "memory": memory_bound, "deferral": deferral_bound}
    return alone | {name: bound(problem, objective) for name, bound in each.items()}


def cpsat_finds(problem: Problem, objective: Objective) -> tuple[float, dict[str, float]]:
    """The length of its best schedule, which is checked, and its own bound."""
    frames: list[Frame] = []
    request = Request(problem=problem, method="cpsat", objective=objective, time_limit_s=CPSAT_S, threads=1)
    cpsat.ENGINE.run(request, frames.append)
    found = [frame.schedule.schedule(problem, "") for frame in frames if isinstance(frame, Incumbent)]
    assert check(problem, found[-1]) == []
    told = [frame.lower_bound_ms for frame in frames if isinstance(frame, Bound)]
    return length_ms(found[-1], objective), {"cpsat": max(told, default=0.0)}


def no_bound_is_above_what_cpsat_finds(problem: Problem, objective: Objective) -> None:
    assume(infeasibility(problem) is None)
    shortest_ms, told = cpsat_finds(problem, objective)
    ours = bounds_of(problem, objective)
    assert {name: ms for name, ms in (ours | told).items() if ms > shortest_ms + NOISE} == {}
    event(f"the best of them is {'all' if max(ours.values()) >= shortest_ms - NOISE else 'less than'} CP-SAT's length")
    event(f"CP-SAT's length is {'' if told['cpsat'] >= shortest_ms - NOISE else 'not '}proven by its own bound")


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


@pytest.mark.soak  # likewise
@settings(max_examples=examples(10), deadline=None)
@given(problem=tiny())
def test_no_schedule_of_a_tiny_problem_is_shorter(problem: Problem) -> None:
    no_schedule_is_shorter(problem)


def no_schedule_is_shorter(problem: Problem) -> None:
    assume(infeasibility(problem) is None)
    for objective in OBJECTIVES:
        best_ms, _ = best_of_all(problem, objective)
        assert {name: ms for name, ms in bounds_of(problem, objective).items() if ms > best_ms + NOISE} == {}
