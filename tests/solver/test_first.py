"""First schedules: many requests, each answered with what the real search would begin with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.frames import bounds, schedules
from support.problems.chain import chain, gpipe
from support.problems.strategies import problems

from optpipe import Problem, check
from optpipe.dispatch.descents import first_rules
from optpipe.dispatch.simulate import Simulator
from optpipe.errors import InputError
from optpipe.evaluate.objective import length_ms
from optpipe.model.placement import rechunk
from optpipe.process.protocol import End, Frame, Incumbent, Infeasible, Note, Programs, Refused, Request
from optpipe_solver import first
from optpipe_solver.bounds import lower_bound
from optpipe_solver.bounds.least_memory import infeasibility
from optpipe_solver.methods import ENGINES, METHODS
from optpipe_solver.portfolio import Portfolio
from optpipe_solver.systems import SYSTEMS

EXAMPLES = Path(__file__).parents[2] / "examples" / "problems"


def ask(request: Request) -> list[Frame]:
    frames: list[Frame] = []
    first.answer(request, frames.append)
    return frames


@pytest.mark.parametrize("objective", ["makespan", "span"])
@given(
    problem=problems(beyond=True),
    memory=st.sampled_from([0.5, 1.0, 1.5, 3.0, 100.0]),
    seconds=st.sampled_from([1e-3, 0.1]),
)
@settings(max_examples=examples(12))
def test_an_answer_is_valid_or_says_why_there_is_none(objective, problem, memory, seconds):
    problem = problem.with_memory_for(memory)
    *frames, end = ask(Request(problem=problem, objective=objective, time_limit_s=seconds))
    assert isinstance(end, End)
    if reason := infeasibility(problem):
        assert [frame for frame in frames if isinstance(frame, Incumbent | Infeasible)] == [Infeasible(reason=reason)]
        return
    found = schedules(frames, problem)
    assert all(check(problem, schedule) == [] for schedule in found)
    values = [length_ms(schedule, objective) for schedule in found]
    assert values == sorted(values, reverse=True) != []
    bound = max(bounds(frames))
    assert bound == pytest.approx(lower_bound(problem, objective))
    assert values[-1] >= bound * (1 - 1e-9)


@pytest.mark.parametrize(
    ("problem", "seconds", "methods"),
    [
        (Problem.load(EXAMPLES / "fastlink-4x8.json"), 0.09, ["po-h", "adaoffload"]),
        (Problem.load(EXAMPLES / "fastlink-8x16.json"), 0.09, ["po-h", "adaoffload"]),
        (rechunk(chain(m=2000, memory=4), 8), 1e-3, ["interleaved"]),
    ],
    ids=["small", "not large", "large"],
)
def test_a_large_problem_has_a_published_schedule_others_list_scheduling_too(problem, seconds, methods):
    """Seconds of processor time, so the same schedules come however busy the machine is."""
    found = schedules(ask(Request(problem=problem, time_limit_s=seconds)), problem)
    assert [schedule.method for schedule in found] == methods


def test_an_answer_is_no_longer_than_what_dispatch_begins_with_unless_there_is_no_time():
    problem = Problem.load(EXAMPLES / "slowlink-8x16.json")
    hurried, frames = (ask(Request(problem=problem, time_limit_s=seconds)) for seconds in (0.05, 0.2))
    assert "dispatch" not in {schedule.method for schedule in schedules(hurried, problem)}
    *_, last = schedules(frames, problem)
    simulator = Simulator(problem)
    assert last.makespan_ms <= min(simulator.length_ms(rules, "makespan") for rules in first_rules(simulator)) < 1284


@pytest.mark.parametrize(
    "method", [*METHODS, *SYSTEMS, "nope", "gis:group=1", "gis:group", "1f1b:group=2", "gis:group=5,group=5"]
)
def test_a_method_is_refused_as_the_real_search_refuses_it(method):
    request = Request(problem=chain(), method=method, time_limit_s=1e-3)
    *frames, last = ask(request)
    if isinstance(last, Refused):
        with pytest.raises(InputError) as refused:
            Portfolio(request, lambda _: None)
        assert last.reason == str(refused.value)
        assert frames == []
    else:
        Portfolio(request, lambda _: None)
        assert all(method in ("auto", *ENGINES, frame.method) for frame in frames if isinstance(frame, Incumbent))


def test_a_warm_start_is_taken():
    problem = chain()
    *frames, _ = ask(Request(problem=problem, warm_start=Programs.from_schedule(gpipe(problem)), time_limit_s=1e-3))
    assert schedules(frames, problem)[0].makespan_ms == gpipe(problem).makespan_ms


def test_what_fails_in_one_request_is_not_the_next_ones(monkeypatch):
    def broken(*_: object) -> bool:
        raise MemoryError("too much")

    told: list[Frame] = []
    with monkeypatch.context() as patched:
        patched.setattr(Portfolio, "begin", broken)
        first.answer(Request(problem=chain()), told.append)
    assert told == [Note(text="no first schedule: MemoryError: too much"), End()]
    told.clear()
    first.answer(Request(problem=chain()), told.append)
    assert schedules(told, chain())


GROWTH = """
import sys, time
from optpipe.process.protocol import Request
from optpipe_solver import first
from support.problems.chain import chain
import psutil
first.warm_up()
def asked(times):
    for _ in range(times):
        frames = []
        problem = chain(m=6).replace(p2p_ms=0.1 + time.monotonic() % 1)
        first.answer(Request(problem=problem, time_limit_s=1e-3), frames.append)
        assert len(frames) > 1
    return psutil.Process().memory_info().rss
count = int(sys.argv[1])
print(-asked(count // 3) + asked(count))
"""


@pytest.mark.parametrize("count", [90, pytest.param(5000, marks=pytest.mark.soak)])
def test_memory_does_not_grow(count):
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    told = subprocess.run(
        [sys.executable, "-c", GROWTH, str(count)], env=env, capture_output=True, text=True, check=True
    )
    assert int(told.stdout) < 16 * 2**20
