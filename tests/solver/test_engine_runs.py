"""From which schedule an engine run starts, and when an engine does not run again."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from support.chain import chain

from optpipe import Problem, Schedule
from optpipe.model.rules import Rules
from optpipe.process.child import Child
from optpipe.process.protocol import End, Frame, Incumbent, Note, Programs, Request
from optpipe_solver import plan
from optpipe_solver.heuristics import generate
from optpipe_solver.plan import EngineRun
from optpipe_solver.portfolio import engine_processes
from optpipe_solver.portfolio.engine_processes import EngineProcess
from optpipe_solver.portfolio.engine_runs import EngineRuns
from optpipe_solver.portfolio.search_state import SearchState
from optpipe_solver.portfolio.time_limit import TimeLimit

PROBLEM: Problem = chain(m=6)
NAIVE, BETTER = generate("naive", PROBLEM), generate("adaoffload", PROBLEM)


@pytest.fixture
def state() -> SearchState:
    """What is known when `naive` has run."""
    found = SearchState(Request(problem=PROBLEM), lambda frame: None)
    assert found.offer(NAIVE) is None
    return found


@pytest.fixture
def runs(state: SearchState) -> EngineRuns:
    request = Request(problem=PROBLEM)
    return EngineRuns(request, [], state, TimeLimit(request), lambda frame: None)


def end(runs: EngineRuns, start: Schedule | None, spent_s: float) -> None:
    """As if lns had ended by itself, by its own count after so much of ten seconds."""
    process = EngineProcess("lns", cast(Child, None), 1, start, time.monotonic() + 60, allotted_s=10.0, spent_s=spent_s)
    runs.handle(process, None)


def test_a_run_from_heuristics_starts_from_the_best_that_no_engine_found(
    runs: EngineRuns, state: SearchState, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[Schedule | None] = []
    monkeypatch.setattr(
        engine_processes.EngineProcesses,
        "start",
        lambda self, request, start, deadline, allotted_s: starts.append(start),
    )
    found = replace(BETTER, method="dispatch")
    assert state.offer(found) is None
    for run in (EngineRun("lns"), EngineRun("lns", from_heuristics=True)):
        runs.start(run, 5.0, 1)
    assert starts == [found, NAIVE]


def test_what_is_better_and_has_no_rules_gets_those_of_the_best(runs: EngineRuns, state: SearchState) -> None:
    rules = Rules(np.array([1, 1]), np.zeros((2, 2)), np.zeros((2, 6), dtype=int), np.zeros(2))
    best = generate("zb-auto", PROBLEM)
    assert NAIVE.makespan_ms > BETTER.makespan_ms > best.makespan_ms
    assert state.offer(replace(BETTER, rules=rules)) is None
    process = EngineProcess("lns", cast(Child, None), 1, NAIVE, time.monotonic() + 60, allotted_s=10.0)
    runs.handle(process, Incumbent(method="lns", schedule=Programs.from_schedule(best)))
    assert state.best is not None
    assert state.best.makespan_ms == best.makespan_ms
    assert state.best.rules is rules


def test_an_engine_has_a_second_at_least(state: SearchState, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small share of a short time would be over before the engine has started."""
    allotted: list[float] = []
    monkeypatch.setattr(
        engine_processes.EngineProcesses,
        "start",
        lambda self, request, start, deadline, allotted_s: allotted.append(allotted_s),
    )
    request = Request(problem=PROBLEM, time_limit_s=60.0, threads=2)
    for share in (0.001, 0.5):
        planned = [EngineRun("lns", share), EngineRun("lns", repeat=True)]
        EngineRuns(request, planned, state, TimeLimit(request), lambda frame: None).start_next(beside_heuristics=True)
    assert allotted[0] == plan.ENGINE_LEAST_S < 20.0 < allotted[1]


@pytest.mark.parametrize(("threads", "limit_s"), [(2, plan.NO_LIMIT_S), (1, 4.5)])
def test_relax_ends_by_its_own_count_only_where_work_is_counted(
    threads: int, limit_s: float, state: SearchState, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    monkeypatch.setattr(
        engine_processes.EngineProcesses,
        "start",
        lambda self, request, start, deadline, allotted_s: limits.append(request.time_limit_s),
    )
    request = Request(problem=PROBLEM, threads=threads)
    EngineRuns(request, [], state, TimeLimit(request), lambda frame: None).start(EngineRun("relax"), 5.0, 1)
    assert limits == [limit_s]


LNS = EngineRun("lns")


def test_an_engine_that_ended_early_runs_again_only_from_another_schedule(runs: EngineRuns, state: SearchState) -> None:
    assert runs.may_gain(LNS)
    end(runs, NAIVE, spent_s=1.0)
    assert not runs.may_gain(LNS)
    assert runs.may_gain(EngineRun("cpsat"))
    found = replace(BETTER, method="dispatch")
    state.offer(found)
    assert runs.may_gain(LNS)
    assert not runs.may_gain(EngineRun("lns", from_heuristics=True))
    end(runs, found, spent_s=1.0)
    assert not runs.may_gain(LNS)


def test_an_engine_that_used_its_time_runs_again(runs: EngineRuns) -> None:
    end(runs, NAIVE, spent_s=9.0)
    assert runs.may_gain(LNS)


def milp_runs(told: list[Frame], time_limit_s: float) -> EngineRuns:
    """A search for which the MILP was asked by name, before it begins."""
    request = Request(problem=PROBLEM, method="milp", time_limit_s=time_limit_s)
    return EngineRuns(request, [EngineRun("milp")], SearchState(request, told.append), TimeLimit(request), told.append)


def test_where_the_milp_is_stopped_before_its_report_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("milp", "slow")
    monkeypatch.setattr(engine_processes, "ENGINE", "support.fake_engine")
    told: list[Frame] = []
    runs = milp_runs(told, 60.0)
    runs.start(EngineRun("milp"), 0.01, 1)
    while runs.running:
        runs.handle_messages(0.1)
    assert told[-1] == Note(text="milp: time was up before it could say how its search ended", method="milp")
    assert told[:-1] in ([], [Note(text="asleep")])


def test_where_the_milp_has_ended_there_is_none() -> None:
    told: list[Frame] = []
    runs, process = milp_runs(told, 60.0), EngineProcess("milp", cast(Child, None), 1, None, 0.0, 1.0, overdue=True)
    for message in (End(), None):  # its last words came just before it was stopped
        runs.handle(process, message)
    assert told == []


@pytest.mark.parametrize("turn", [True, False])
def test_where_no_time_is_left_for_the_milp_a_note_says_so(turn: bool) -> None:
    """Whether its turn comes too late, or not at all because heuristics took all of the time."""
    told: list[Frame] = []
    runs = milp_runs(told, plan.ENGINE_END_S)
    if turn:
        runs.start_next(beside_heuristics=False)
    runs.stop_all()
    assert told == [Note(text="milp: there was no time left to start it", method="milp")]


@pytest.mark.parametrize(("engine", "counts"), [("milp", False), ("lns", True)])
def test_with_one_thread_the_milp_has_all_of_the_time(
    state: SearchState, monkeypatch: pytest.MonkeyPatch, engine: str, counts: bool
) -> None:
    """Its solvers count no work, so none of the clock is kept for a busy machine."""
    allotted: list[float] = []
    monkeypatch.setattr(
        engine_processes.EngineProcesses,
        "start",
        lambda self, request, start, deadline, allotted_s: allotted.append(allotted_s),
    )
    request = Request(problem=PROBLEM, method=engine, threads=1, time_limit_s=1000.0)
    limit = TimeLimit(request)
    EngineRuns(request, [EngineRun(engine)], state, limit, lambda frame: None).start_next(beside_heuristics=False)
    assert (allotted[0] < 0.9 * limit.left_s) == counts
