"""All that finds or bounds schedules of small problems, against CP-SAT and against every schedule there is.

`python -m pytest tests/solver/test_all_bounds.py -m soak --hypothesis-show-statistics` tries thousands of problems, in
half an hour, and says how often a bound is the optimum.
"""

from itertools import islice

import pytest
from hypothesis import Phase, assume, event, find, given, reject, settings
from hypothesis import strategies as st
from support.examples import examples
from support.oracles.bounds import bounds_of, cpsat_finds, read_frames
from support.oracles.enumeration import TooManyError, best_of_all, length
from support.oracles.milp import Solver
from support.problems.small import (
    partly_frozen,
    problems_of_every_sort,
    several_a_device,
    short_of_memory,
    slow_one_way,
    tiny,
    unequal_and_tiny,
)

from optpipe import Problem, certify, check
from optpipe.evaluate.objective import NO_SCHEDULE_MS, Objective
from optpipe.process.protocol import Note
from optpipe.reuse import by_rules
from optpipe.steps import StepScheduler
from optpipe_solver import milp as milp_engine
from optpipe_solver.bounds.least_memory import infeasibility
from optpipe_solver.heuristics import STREAMS

OBJECTIVES: tuple[Objective, ...] = ("makespan", "span")
NOISE = 1e-6  # ms
CPSAT_S = 2.0  # of counted work; most of these problems are proven in a tenth of it


def few_or_many(few: int, many: int) -> pytest.MarkDecorator:
    """Parametrizes how many `problems` are tried: few, or many in a soak test."""
    return pytest.mark.parametrize("problems", [examples(few), pytest.param(many, marks=pytest.mark.soak)])


@few_or_many(25, 1_500)
def test_no_bound_is_above_what_cpsat_finds(problems: int) -> None:
    kinds = (
        short_of_memory(most_microbatches=5),
        several_a_device(most_microbatches=4),
        problems_of_every_sort(),
        partly_frozen(3, 5),
    )

    @settings(max_examples=problems)
    @given(problem=st.one_of(kinds), objective=st.sampled_from(OBJECTIVES))
    def holds(problem: Problem, objective: Objective) -> None:
        assume(infeasibility(problem) is None)
        schedules, cpsat_ms = cpsat_finds(problem, objective, CPSAT_S)
        assert check(problem, schedules[-1]) == []
        shortest_ms = length(schedules[-1], objective)
        ours = bounds_of(problem, objective)
        assert above(shortest_ms, ours | {"cpsat": cpsat_ms}) == {}
        event(f"the best is {'all' if max(ours.values()) >= shortest_ms - NOISE else 'less than'} CP-SAT's length")
        event(f"CP-SAT's length is {'' if cpsat_ms >= shortest_ms - NOISE else 'not '}proven by its own bound")

    holds()


def above(length_ms: float, bounds: dict[str, float]) -> dict[str, float]:
    """The bounds that are above a length."""
    return {name: ms for name, ms in bounds.items() if ms > length_ms + NOISE}


@pytest.mark.parametrize(
    ("kind", "problems"),
    [
        (partly_frozen(most_microbatches=2), examples(40)),
        (slow_one_way(), examples(40)),
        pytest.param(partly_frozen(), examples(100), marks=pytest.mark.soak),  # minutes: all schedules of each
        pytest.param(st.one_of(tiny(), unequal_and_tiny()), 20_000, marks=pytest.mark.soak),  # minutes
    ],
)
def test_no_schedule_is_shorter(kind: st.SearchStrategy[Problem], problems: int) -> None:
    @settings(max_examples=problems)
    @given(problem=kind)
    def holds(problem: Problem) -> None:
        assume(infeasibility(problem) is None)
        for objective in OBJECTIVES:
            best_ms, bounds = best_or_reject(problem, objective), bounds_of(problem, objective)
            assert above(best_ms, bounds) == {}
            event(f"the optimum is {'' if max(bounds.values()) >= best_ms - NOISE else 'not '}proven")

    holds()


def best_or_reject(problem: Problem, objective: Objective, all_of_them: bool = False) -> float:
    try:
        return best_of_all(problem, objective, all_of_them)[0]
    except TooManyError:
        reject()


@few_or_many(8, 5_000)
def test_nothing_is_shorter_than_the_best_of_all(solver: Solver, problems: int) -> None:
    @settings(max_examples=problems)
    @given(problem=unequal_and_tiny(), objective=st.sampled_from(OBJECTIVES))
    def holds(problem: Problem, objective: Objective) -> None:
        best_ms = best_or_reject(problem, objective)
        if best_ms == NO_SCHEDULE_MS:
            event("no schedule fits")
            return
        assert infeasibility(problem) is None
        bounds = bounds_of(problem, objective)
        event(f"the optimum is {'' if max(bounds.values()) >= best_ms - NOISE else 'not '}proven by bounds alone")
        schedules, bounds["cpsat"] = cpsat_finds(problem, objective, 5.0)
        assert length(schedules[-1], objective) == pytest.approx(best_ms, abs=NOISE)
        if milp_engine.unsupported(problem) is None:
            frames = solver.frames(problem, objective=objective)
            of_milp, bounds["milp"] = read_frames(problem, frames)
            schedules += of_milp
            if not any("is no bound" in frame.text for frame in frames if isinstance(frame, Note)):
                assert length(of_milp[-1], objective) == pytest.approx(best_ms, abs=NOISE)
        assert above(best_ms, bounds) == {}
        event(f"the optimum is {'' if max(bounds.values()) >= best_ms - NOISE else 'not '}proven by one of all")
        listed = [each for name in ("adaoffload", "naive") for each in islice(STREAMS[name](problem, objective), 3)]
        schedules += [schedule for schedule in listed if certify(problem, schedule).fits]
        if len(problem.all_routes) == 1:
            by_few_rules = by_rules(problem, None, objective, 20_000)
            schedules += [by_few_rules] if by_few_rules else []
            schedules.append(StepScheduler(problem).plan(problem, improve=False).first)
        for schedule in schedules:
            assert not check(problem, schedule)
            assert length(schedule, objective) >= best_ms - NOISE

    holds()


@settings(max_examples=examples(10))
@given(problem=unequal_and_tiny(), objective=st.sampled_from(OBJECTIVES))
def test_what_enumeration_leaves_out_is_no_better(problem: Problem, objective: Objective) -> None:
    best_ms = best_or_reject(problem, objective, all_of_them=True)
    assert best_of_all(problem, objective)[0] == best_ms


def test_a_bound_that_is_too_high_by_2_percent_is_seen() -> None:
    def is_seen(problem: Problem) -> bool:
        try:
            best_ms, _ = best_of_all(problem, "makespan")
        except TooManyError:
            return False
        return best_ms < NO_SCHEDULE_MS and 1.02 * max(bounds_of(problem, "makespan").values()) > best_ms + NOISE

    find(unequal_and_tiny(), is_seen, settings=settings(max_examples=50, phases=[Phase.generate]))
