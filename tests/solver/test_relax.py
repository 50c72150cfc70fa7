"""The bound of one device alone: below every schedule, and what one computes by hand where that is easy."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import problems
from support.enumeration import EXHAUSTIVE, RICHER, SPAN, best_of_all, problem_of, stage
from support.examples import examples
from support.strategies import problems_with_schedules

from optpipe import Problem, certify
from optpipe.evaluate.objective import length_ms
from optpipe.process.protocol import Request
from optpipe_solver.bounds import memory_bound
from optpipe_solver.bounds.least_memory import infeasibility
from optpipe_solver.dispatch.search import descents
from optpipe_solver.dispatch.simulate import Simulator
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.relax.one_device import bounds, devices

FEW = 5_000  # states of a device


def bound_of(problem: Problem, objective: str = "makespan") -> float:
    """The highest bound of all devices."""
    return max((ms for d in devices(problem) for ms in bounds(problem, d, objective, FEW)), default=0.0)


@st.composite
def short_of_memory(draw: st.DrawFn, most_devices: int = 3, most_microbatches: int = 9) -> Problem:
    """One stage a device, each with costs of its own; activations stay, leave in parts or are computed again."""
    count = draw(st.integers(1, most_devices))
    stages, memory = [], []
    ms = st.sampled_from((0, 1, 2, 3, 5, 8, 13))
    for d in range(count):
        parts = draw(st.integers(1, 3))
        size = parts * draw(st.integers(1, 3))
        gone = parts * draw(st.integers(1, size // parts))
        away = (draw(ms), draw(ms), gone) if draw(st.integers(0, 2)) else None
        again = (draw(ms), draw(st.integers(0, size))) if draw(st.integers(0, 2)) == 0 else None
        kept = draw(st.integers(0, size))
        stages.append(stage(d, (draw(ms), draw(ms), draw(ms)), size, kept, away, again, parts))
        memory.append(size + draw(st.integers(0, 2 * size)))
    duplex = draw(st.sampled_from(("half_duplex", "full_duplex")))
    links = [{"link": draw(st.sampled_from((None, "bus")))} for _ in range(count)]
    m = draw(st.integers(2, most_microbatches))
    return problem_of(stages, memory, m, draw(st.sampled_from((0.0, 1.0))), transfer_mode=duplex, devices=links)


@settings(max_examples=examples(60), deadline=None)
@given(problems_with_schedules(beyond=True, max_microbatches=3))
def test_no_schedule_is_shorter_in_the_memory_that_it_needs(pair):
    problem, schedule = pair
    peaks = [peak.bytes for peak in certify(problem, schedule).device]
    tight = problem.replace(
        devices=[
            device.model_copy(update={"activation_budget_bytes": peak})
            for device, peak in zip(problem.devices, peaks, strict=True)
        ]
    )
    for objective in ("makespan", "span"):
        assert bound_of(tight, objective) <= length_ms(schedule, objective) + 1e-6


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("problem", [*EXHAUSTIVE.values(), *RICHER.values(), SPAN])
def test_it_is_no_more_than_the_best_of_all_schedules(problem, objective):
    assert bound_of(problem, objective) <= best_of_all(problem, objective)[0] + 1e-9


@st.composite
def tiny(draw: st.DrawFn) -> Problem:
    """Two micro-batches on two devices, one of which has a choice or none."""
    ms, size = st.integers(0, 4), 2 * draw(st.integers(1, 2))
    choice = draw(st.sampled_from(("none", "whole", "parts", "again")))
    away = (draw(ms), draw(ms), draw(st.sampled_from((2, size)))) if choice in ("whole", "parts") else None
    again = (draw(ms), draw(st.integers(0, size))) if choice == "again" else None
    costs = draw(ms), draw(ms), draw(ms)
    short = stage(0, costs, size, draw(st.integers(0, size)), away, again, 2 if choice == "parts" else 1)
    plain = stage(1, (draw(ms), draw(ms), draw(ms)), 1)
    both, memory = [short, plain], [size + draw(st.integers(0, size)), 2]
    if draw(st.booleans()):
        both, memory = [plain | {"device": 0}, short | {"device": 1}], memory[::-1]
    return problem_of(both, memory, 2, 1.0, transfer_mode=draw(st.sampled_from(("half_duplex", "full_duplex"))))


@pytest.mark.soak  # minutes: all schedules of each problem
@settings(max_examples=examples(10), deadline=None)
@given(problem=tiny())
def test_no_schedule_of_a_tiny_problem_is_shorter(problem):
    for objective in ("makespan", "span"):
        assert bound_of(problem, objective) <= best_of_all(problem, objective)[0] + 1e-9


@settings(max_examples=examples(30), deadline=None)
@given(problem=short_of_memory())
def test_nothing_that_is_found_is_shorter(problem):
    """By list scheduling, and by a search among its rules, which is near the optimum of so small problems."""
    assume(infeasibility(problem) is None)
    for objective in ("makespan", "span"):
        bound = bound_of(problem, objective)
        for schedule in islice(STREAMS["adaoffload"](problem, objective), 5):
            assert bound <= length_ms(schedule, objective) + 1e-6
        if problem.costs.ms.any():
            request = Request(problem=problem, objective=objective)
            for _, ms in islice(descents(Simulator(problem), request), 100):
                assert bound <= ms + 1e-6


@pytest.mark.parametrize(("name", "bound"), [("slowlink-8x16", 868.0), ("recompute-4x12", 501.0)])
def test_it_is_what_one_device_takes(name: str, bound: float) -> None:
    """Fractions of activations, and their sum over time, allow for less: 820 and 458.5 ms."""
    problem = Problem.load(Path(__file__).parents[2] / f"examples/problems/{name}.json")
    assert max(list(bounds(problem, d))[-1] for d in devices(problem)) == pytest.approx(bound)
    assert memory_bound(problem) < bound


def test_it_rises_while_it_searches_and_ends_with_the_states_that_it_may_keep() -> None:
    problem = Problem.load(Path(__file__).parents[2] / "examples/problems/slowlink-8x16.json")
    few = list(bounds(problem, 0, rows=30_000))
    assert few == sorted(few)
    assert few[0] < few[-1] < 868.0


def test_a_device_with_two_stages_or_two_routes_is_left_to_others() -> None:
    assert devices(EXHAUSTIVE["two chunks"]) == [1]
    assert devices(EXHAUSTIVE["two directions"]) == []
    assert devices(problems.pipeline(2, 4, 20, problems.stage(), overlap_factor=0.8)) == []
