"""From where an engine's turn starts, and when it gets no other."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import cast

import pytest
from support.chain import chain

from optpipe import Problem, Schedule
from optpipe.process.child import Child, Frame, Note, Request
from optpipe_solver.heuristics import generate
from optpipe_solver.portfolio import Portfolio, engine_processes, plan
from optpipe_solver.portfolio.engine_processes import Worker
from optpipe_solver.portfolio.plan import Turn

PROBLEM: Problem = chain(m=6)
NAIVE, BETTER = generate("naive", PROBLEM), generate("adaoffload", PROBLEM)


@pytest.fixture
def search() -> Portfolio:
    """One that has found what naive finds."""
    found = Portfolio(Request(problem=PROBLEM), lambda frame: None)
    assert found.offer(NAIVE) is None
    return found


def ended(search: Portfolio, start: Schedule | None, spent_s: float) -> None:
    """As if lns had ended by itself, by its own count after so much of ten seconds."""
    worker = Worker("lns", cast(Child, None), 1, start, until=time.monotonic() + 60, given_s=10.0, spent_s=spent_s)
    search.hear(worker, None, deque())


def test_a_turn_that_begins_anew_is_given_no_start(search: Portfolio, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[Schedule | None] = []
    monkeypatch.setattr(search.crew, "start", lambda request, start, until, given_s: starts.append(start))
    for turn in (Turn("lns"), Turn("lns", anew=True)):
        search.start(turn, 5.0, 1)
    assert starts == [NAIVE, None]


def test_the_engine_of_such_a_turn_hears_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setattr(engine_processes, "ENGINE", "support.fake_engine")
    monkeypatch.setattr(plan, "AUTO", (Turn("cyclic", 0.5, anew=True), Turn("milp", 0.5)))
    monkeypatch.setattr(Portfolio, "applies", lambda self, engine: True)
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
def test_who_gave_its_time_back_gets_a_turn_only_from_a_better_schedule(
    search: Portfolio, start: Schedule | None
) -> None:
    """Also where it began anew: from the best schedule there was nothing to gain before, or another turn would have."""
    assert search.may_gain("lns")
    ended(search, start, spent_s=1.0)
    assert not search.may_gain("lns")
    assert search.may_gain("cyclic")
    search.offer(BETTER)
    assert search.may_gain("lns")


def test_what_was_found_while_it_ran_is_a_better_schedule(search: Portfolio) -> None:
    search.offer(BETTER)
    ended(search, NAIVE, spent_s=1.0)
    assert search.may_gain("lns")
    ended(search, None, spent_s=1.0)  # anew, and no better than what is known
    assert not search.may_gain("lns")


def test_who_used_its_time_gets_another_turn(search: Portfolio) -> None:
    ended(search, NAIVE, spent_s=9.0)
    assert search.may_gain("lns")
