"""One thread, one seed: the same answer twice, also where the machine is busy meanwhile."""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

from optpipe import Problem
from optpipe.process.child import Child
from optpipe.process.protocol import End, Incumbent, Programs, Request
from optpipe_solver import clock, tuning
from optpipe_solver.heuristics import generate
from optpipe_solver.portfolio import Portfolio, engine_runs
from optpipe_solver.tuning import EngineRun

TESTS = Path(__file__).parents[1]
EXAMPLES = TESTS.parent / "examples" / "problems"
SLOWER = 1.6  # how much faster the clock of a busy machine runs


def test_the_same_twice_however_busy_the_machine(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("cpsat", "seed")
    monkeypatch.setenv("milp", "tells")
    monkeypatch.setattr(engine_runs, "ENGINE", "support.fakes.engine")
    monkeypatch.setattr(tuning, "AUTO", (EngineRun("cpsat", 0.4), EngineRun("milp", 0.6)))
    monkeypatch.setattr(tuning, "OPS_PER_S", 5_000)
    request = Request(problem=Problem.load(EXAMPLES / "slowlink-8x16.json"), time_limit_s=200.0, threads=1, seed=2)
    quiet = run(request)
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: SLOWER * time.monotonic()))
    assert run(request) == quiet
    assert any(isinstance(frame, Incumbent) for frame in quiet)


def test_an_engine_that_counts_finds_the_same_twice():
    problem = Problem.load(EXAMPLES / "fastlink-4x8.json")
    start = Programs.from_schedule(generate("adaoffload", problem))
    request = Request(problem=problem, method="lns", threads=1, seed=7, time_limit_s=60.0, warm_start=start)
    told = []
    for _ in range(2):
        child = Child(engine_runs.ENGINE, request)
        frames = list(
            islice((frame for frame in child.frames() if not isinstance(frame, End)), 4)
        )  # before any clock has a say
        child.close()
        told.append([frame for frame in frames if isinstance(frame, Incumbent)])
    assert told[0] == told[1] != []


def run(request: Request) -> list[object]:
    frames: list[object] = []
    Portfolio(request, frames.append).run()
    return frames
