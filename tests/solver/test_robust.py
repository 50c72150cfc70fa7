"""Noisy op times: what is found is better under noise that no search has seen, valid, and never called optimal."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

import optpipe
from optpipe import Problem, Schedule, check
from optpipe.evaluate.jitter import Noise
from optpipe.process.protocol import Bound, Incumbent, Note, Programs, Request
from optpipe_solver import robust, tuning
from optpipe_solver.engines import COMPILING
from optpipe_solver.heuristics import generate
from optpipe_solver.portfolio import Portfolio, engine_processes

EXAMPLES = Path(__file__).parents[2] / "examples" / "problems"


@cache
def start() -> Schedule:
    """Short by nominal times, and with room for better under noise."""
    return generate("adaoffload", Problem.load(EXAMPLES / "half-memory-8x16.json"))


def test_local_search_helps_under_noise_that_it_has_not_seen():
    problem = start().problem
    search = robust.LocalSearch(Request(problem=problem, jitter=0.05), start())
    before = search.ms
    values = [search.ms for _ in range(500) if search.step()]
    assert len(values) > 3
    assert all(later < earlier for earlier, later in pairwise([before, *values]))
    assert check(problem, search.schedule) == []
    judge = Noise(problem, 0.05, seed=77)
    assert judge.percentile_ms(search.schedule.compiled) < judge.percentile_ms(start().compiled) - 1.0


def test_the_engine_counts_its_work_with_one_thread():
    request = Request(
        problem=start().problem, jitter=0.05, time_limit_s=0.5, warm_start=Programs.from_schedule(start())
    )
    found: list[list[object]] = [[], []]
    spent = [robust.run(request, frames.append) for frames in found]
    assert spent[0] == spent[1]
    assert 0.5 <= spent[0] < 1.0
    assert found[0] == found[1] != []
    assert robust.run(request.model_copy(update={"warm_start": None}), print) == 0.0


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_the_portfolio_goes_by_the_percentile(monkeypatch, objective):
    monkeypatch.setattr(tuning, "AUTO", ())
    problem = start().problem
    frames: list[object] = []
    Portfolio(
        Request(problem=problem, jitter=0.05, objective=objective, time_limit_s=2.0, threads=2, seed=4), frames.append
    ).run()
    found = [frame.schedule.schedule(problem, frame.method) for frame in frames if isinstance(frame, Incumbent)]
    noise = Noise(problem, 0.05, seed=4)
    values = [noise.percentile_ms(schedule.compiled, objective) for schedule in found]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == len(values)
    assert all(check(problem, schedule) == [] for schedule in found)
    assert all(
        frame.lower_bound_ms <= min(schedule.span_ms for schedule in found)
        for frame in frames
        if isinstance(frame, Bound)
    )


def test_nothing_is_optimal_by_a_bound_on_nominal_times():
    problem = Problem.load(EXAMPLES / "figure4-4x6.json")
    nominal = optpipe.solve(problem, time_limit_s=20.0, method="adaoffload")
    assert nominal.status == "optimal"
    assert nominal.percentile_ms is None
    assert nominal.value_ms == nominal.makespan_ms
    result = optpipe.solve(problem, time_limit_s=120.0, gap=1e-9, threads=2, jitter=0.05, seed=3)
    assert result.status == "feasible"
    assert result.gap == 0.0  # by nominal times
    assert result.percentile_ms == result.value_ms
    assert result.value_ms == Noise(problem, 0.05, seed=3).percentile_ms(result.schedule.compiled)
    assert result.percentile_ms > result.lower_bound_ms
    assert [step.value_ms for step in result.history][-1] == result.percentile_ms
    assert {*result.notes} <= {COMPILING}


def test_where_nothing_is_to_be_gained_by_nominal_times_only_robust_goes_on(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parents[1] / "tests"))
    monkeypatch.setenv("cpsat", "slow")
    monkeypatch.setenv("milp", "slow")
    monkeypatch.setenv("robust", "seed 2.0")
    monkeypatch.setattr(engine_processes, "ENGINE", "support.fakes.engine")
    monkeypatch.setattr(tuning, "AUTO", (tuning.EngineRun("cpsat", 0.4), tuning.EngineRun("milp", 0.3)))
    frames: list[object] = []
    request = Request(problem=Problem.load(EXAMPLES / "figure4-4x6.json"), jitter=0.05, time_limit_s=16.0, threads=1)
    Portfolio(request, frames.append).run()
    told = [frame.text for frame in frames if isinstance(frame, Note)]
    assert len(told) > 1
    assert all(text.startswith("robust with seed ") for text in told)
