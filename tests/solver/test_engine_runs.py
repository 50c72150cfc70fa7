"""From which schedule an engine run starts, and when an engine does not run again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import cast

import pytest
from support.chain import chain

from optpipe import Problem, Schedule
from optpipe.process.child import Child
from optpipe.process.protocol import Frame, Note, Request
from optpipe_solver import plan
from optpipe_solver.heuristics import generate
from optpipe_solver.plan import EngineRun
from optpipe_solver.portfolio import Portfolio, engine_processes
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


def test_a_run_from_scratch_has_no_warm_start(runs: EngineRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[Schedule | None] = []
    monkeypatch.setattr(
        engine_processes.EngineProcesses,
        "start",
        lambda self, request, start, deadline, allotted_s: starts.append(start),
    )
    for run in (EngineRun("lns"), EngineRun("lns", from_scratch=True)):
        runs.start(run, 5.0, 1)
    assert starts == [NAIVE, None]


def test_nor_is_the_engine_sent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setattr(engine_processes, "ENGINE", "support.fake_engine")
    monkeypatch.setattr(plan, "AUTO", (EngineRun("cyclic", 0.5, from_scratch=True), EngineRun("milp", 0.5)))
    monkeypatch.setattr(Portfolio, "supports", lambda self, engine: True)
    for engine in ("cyclic", "milp"):
        monkeypatch.setenv(engine, "tells")
    tight = PROBLEM.replace(
        devices=[{"activation_budget_bytes": device.activation_budget_bytes // 2} for device in PROBLEM.devices]
    )
    frames: list[Frame] = []
    Portfolio(Request(problem=tight, threads=1, time_limit_s=60.0), frames.append).run()
    told = [frame.text.split(",")[0] for frame in frames if isinstance(frame, Note)]
    assert told == ["start False", "start True"]


@pytest.mark.parametrize("start", [NAIVE, None])
def test_an_engine_that_ended_early_runs_again_only_from_a_better_schedule(
    runs: EngineRuns, state: SearchState, start: Schedule | None
) -> None:
    """Also if it ran from scratch: there was nothing to gain from the best schedule before, or it would have run."""
    assert runs.may_gain("lns")
    end(runs, start, spent_s=1.0)
    assert not runs.may_gain("lns")
    assert runs.may_gain("cyclic")
    state.offer(BETTER)
    assert runs.may_gain("lns")


def test_what_was_found_while_it_ran_is_a_better_schedule(runs: EngineRuns, state: SearchState) -> None:
    state.offer(BETTER)
    end(runs, NAIVE, spent_s=1.0)
    assert runs.may_gain("lns")
    end(runs, None, spent_s=1.0)  # from scratch, and no better than what is known
    assert not runs.may_gain("lns")


def test_an_engine_that_used_its_time_runs_again(runs: EngineRuns) -> None:
    end(runs, NAIVE, spent_s=9.0)
    assert runs.may_gain("lns")
