"""More memory, more parts or another way to relieve memory never leads to a longer schedule; what gains gets time."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems import pipeline, stage, with_budgets
from support.problems.chain import chain

from optpipe import simulate
from optpipe.model.placement import Placement
from optpipe.model.problem import Problem
from optpipe.process.protocol import Programs, Request
from optpipe.schedule import Schedule
from optpipe_solver import tuning
from optpipe_solver.clock import Clock
from optpipe_solver.heuristics import STREAMS, generate, one_at_a_time
from optpipe_solver.portfolio import Portfolio
from optpipe_solver.portfolio.heuristic_runs import HeuristicRuns
from optpipe_solver.portfolio.portfolio import in_more_parts, incumbents_of


@pytest.fixture(scope="module", autouse=True)
def few_tries() -> Iterator[None]:
    """What is said here holds of any schedule."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "GENERATE_TRIES", 8)
        yield


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Short of memory, with activations that leave in one to three parts over links that devices may share."""
    devices = draw(st.integers(1, 3))
    sizes = [draw(st.integers(4, 7)) for _ in range(devices)]

    def costs(size: int) -> dict[str, Any]:
        times = draw(st.sampled_from((1.0, 2.5))), draw(st.sampled_from((1.0, 10 / 3))), 1.0
        back_ms = draw(st.sampled_from((0.5, 4.0)))
        offload = draw(st.sampled_from((0.0, 1.0, 7 / 3))), back_ms, draw(st.integers(4, size))
        return stage(times, (size, draw(st.integers(0, size))), offload=offload, offload_parts=draw(st.integers(1, 3)))

    return pipeline(
        devices,
        draw(st.integers(2, 5)),
        [size + draw(st.integers(0, 9)) for size in sizes],
        [costs(size) for size in sizes],
        p2p_ms=draw(st.sampled_from((0.0, 0.5))),
        transfer_mode=draw(st.sampled_from(("half_duplex", "full_duplex"))),
        device={"link": draw(st.sampled_from((None, "bus")))},
    )


def with_stages(problem: Problem, **more: Any) -> Problem:
    return problem.replace(stages=[stage.model_copy(update=more) for stage in problem.stages])


def first_ms(problem: Problem, start: Schedule) -> float:
    """What the search of a problem has before it searches, if it is given a schedule of another problem."""
    portfolio = Portfolio(Request(problem=problem, warm_start=Programs.from_schedule(start)), lambda frame: None)
    portfolio.begin()
    return portfolio.incumbents.best_ms


@settings(max_examples=examples(60), deadline=None)
@given(problem=problems(), times=st.integers(2, 3), more=st.integers(1, 9))
def test_a_search_begins_with_what_is_valid_with_less(problem: Problem, times: int, more: int) -> None:
    known = generate("adaoffload", problem)
    finer = problem.replace(
        stages=[s.model_copy(update={"offload_parts": times * s.offload_parts}) for s in problem.stages]
    )
    roomier = with_budgets(problem, [device.activation_budget_bytes + more for device in problem.devices])
    freer = with_stages(problem, recompute_ms=1.0, checkpoint_bytes=1)
    for larger in (finer, roomier, freer):
        assert first_ms(larger, known) <= known.makespan_ms + 1e-6


@pytest.mark.parametrize("p2p_ms", [0.0, 0.5])
def test_a_placed_schedule_begins_a_search_on_the_stages_that_its_placement_made(p2p_ms: float) -> None:
    """Also with other times."""
    placement = Placement(chunks=2, shape="v")
    costs = stage(sizes=(4, 2), offload=(0.25, 0.25, 4))
    start = replace(generate("adaoffload", placement.apply(pipeline(4, 8, 6, costs))), placement=placement)
    problem = placement.apply(pipeline(4, 8, 6, costs, p2p_ms=p2p_ms))
    assert first_ms(problem, start) == simulate(problem, start).makespan_ms


def test_a_schedule_with_all_parts_stays_as_it_is():
    assert list(in_more_parts(generate("adaoffload", chain(m=3)))) == []


@pytest.mark.parametrize(("gains_at_s", "ready_s", "until_s"), [(1.0, 0.0, 10.0), (10.0, 0.0, 15.0), (1.0, 40.0, 40.0)])
def test_heuristics_go_on_while_they_gain_or_no_engine_is_ready(
    gains_at_s: float, ready_s: float, until_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have 10 s of 100, and half as long again as until their last gain."""
    problem, now = chain(m=6), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    request = Request(problem=problem, threads=2)
    incumbents = incumbents_of(request, lambda frame: None)
    naive, better = one_at_a_time(problem, "naive"), generate("adaoffload", problem)

    def stream(*_: Any) -> Iterator[Schedule]:
        while True:
            now[0] += 1.0
            yield better if now[0] >= gains_at_s else naive

    monkeypatch.setitem(STREAMS, "naive", stream)
    heuristics = HeuristicRuns(request.model_copy(update={"method": "naive"}), None, incumbents, Clock(100.0), print)
    for _ in heuristics.run(0.1, lambda: now[0] < ready_s):
        pass
    assert now[0] == pytest.approx(until_s, abs=1.0)
