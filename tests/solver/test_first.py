"""First schedules: one process, many requests, each answered with what the real search would begin with."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems.chain import chain, gpipe
from support.problems.strategies import problems
from support.processes import over

from optpipe import Problem, check
from optpipe.dispatch.simulate import Simulator
from optpipe.dispatch.starts import first_rules
from optpipe.errors import InputError
from optpipe.model.placement import rechunk
from optpipe.process.child import Child
from optpipe.process.protocol import Bound, End, Frame, Incumbent, Infeasible, Note, Programs, Refused, Request
from optpipe.schedule import Schedule
from optpipe_solver import first
from optpipe_solver.bounds import memory_bound, trivial_bound
from optpipe_solver.bounds.least_memory import infeasibility
from optpipe_solver.methods import ENGINES, METHODS
from optpipe_solver.portfolio import Portfolio
from optpipe_solver.systems import SYSTEMS

MODULE = "optpipe_solver.first"
EXAMPLES = Path(__file__).parents[2] / "examples" / "problems"


@pytest.fixture(scope="module")
def process() -> Iterator[Child]:
    child = Child(MODULE)
    yield child
    assert not child.ended
    child.close()


def schedules(frames: list[Frame], problem: Problem) -> list[Schedule]:
    return [frame.schedule.schedule(problem, frame.method) for frame in frames if isinstance(frame, Incumbent)]


@pytest.mark.parametrize("objective", ["makespan", "span"])
@given(
    problem=problems(beyond=True),
    memory=st.sampled_from([0.5, 1.0, 1.5, 3.0, 100.0]),
    seconds=st.sampled_from([1e-3, 0.1]),
)
@settings(max_examples=examples(12))
def test_an_answer_is_valid_or_says_why_there_is_none(process, objective, problem, memory, seconds):
    problem = problem.with_memory_for(memory)
    *frames, end = process.ask(Request(problem=problem, objective=objective, time_limit_s=seconds))
    assert isinstance(end, End)
    reason = infeasibility(problem)
    if reason:
        assert [type(frame) for frame in frames if not isinstance(frame, Note)] == [Infeasible]
        assert [frame.reason for frame in frames if isinstance(frame, Infeasible)] == [reason]
        return
    values = []
    for schedule in schedules(frames, problem):
        assert check(problem, schedule) == []
        values.append(schedule.makespan_ms if objective == "makespan" else schedule.span_ms)
    assert values
    assert values == sorted(values, reverse=True)
    bounds = [frame.lower_bound_ms for frame in frames if isinstance(frame, Bound)]
    assert max(bounds) == pytest.approx(max(trivial_bound(problem, objective), memory_bound(problem, objective)))
    assert values[-1] >= max(bounds) * (1 - 1e-9)


@pytest.mark.parametrize("name", ["fastlink-4x8", "fastlink-8x16"])
def test_a_small_problem_has_more_than_naive(process, name):
    problem = Problem.load(EXAMPLES / f"{name}.json")
    found = schedules(list(process.ask(Request(problem=problem, time_limit_s=1e-3))), problem)
    assert found[0].method == "adaoffload"


def test_an_answer_is_no_longer_than_what_dispatch_begins_with(process):
    problem = Problem.load(EXAMPLES / "slowlink-8x16.json")
    *_, last = schedules(list(process.ask(Request(problem=problem, time_limit_s=1e-3))), problem)
    simulator = Simulator(problem)
    assert last.makespan_ms <= min(simulator.length_ms(rules, "makespan") for rules in first_rules(simulator)) < 1284


def test_a_large_problem_has_naive_at_once(process):
    problem = rechunk(chain(m=2000, memory=4), 8)
    found = schedules(list(process.ask(Request(problem=problem, time_limit_s=1e-3))), problem)
    assert found[0].method == "naive"


@pytest.mark.parametrize(
    "method", [*METHODS, *SYSTEMS, "nope", "gis:group=1", "gis:group", "1f1b:group=2", "gis:group=5,group=5"]
)
def test_a_method_is_refused_as_the_real_search_refuses_it(process, method):
    request = Request(problem=chain(), method=method, time_limit_s=1e-3)
    *frames, last = process.ask(request)
    if isinstance(last, Refused):
        with pytest.raises(InputError) as refused:
            Portfolio(request, lambda _: None)
        assert last.reason == str(refused.value)
        assert frames == []
    else:
        Portfolio(request, lambda _: None)
        assert all(method in ("auto", *ENGINES, frame.method) for frame in frames if isinstance(frame, Incumbent))


def test_a_warm_start_is_taken(process):
    problem = chain()
    *frames, _ = process.ask(
        Request(problem=problem, warm_start=Programs.from_schedule(gpipe(problem)), time_limit_s=1e-3)
    )
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


def test_a_line_that_is_no_request_is_refused_and_the_next_one_answered():
    with subprocess.Popen(
        [sys.executable, "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdin
        assert process.stdout
        try:
            for line in (
                b"{not a request",
                b"\xff\xfe",
                b"",
                Request(problem=chain()).model_dump_json(exclude_none=True).encode(),
            ):
                process.stdin.write(line + b"\n")
            process.stdin.flush()
            ready, *lines = [process.stdout.readline() for _ in range(5)]
            assert b'"ready"' in ready
            assert all(b'"refused"' in line for line in lines[:3])
            assert b'"bound"' in lines[3]
        finally:
            process.stdin.close()
            assert process.wait(60) == -signal.SIGKILL  # ends itself, with its group, when its input closes


def test_it_ends_with_its_parent():
    code = (
        f"from optpipe.process.child import Child; import time; print(Child({MODULE!r}).pid, flush=True); "
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        process = int(parent.stdout.readline())
        parent.kill()
    until = time.monotonic() + 60
    while not over(process):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("count", [90, pytest.param(5000, marks=pytest.mark.soak)])
def test_memory_does_not_grow(count):
    process = Child(MODULE)
    try:
        problem = chain(m=6)

        def asked(times: int) -> int:
            for _ in range(times):
                shorter = problem.replace(p2p_ms=0.1 + time.monotonic() % 1)
                assert schedules(list(process.ask(Request(problem=shorter, time_limit_s=1e-3))), shorter)
            return int(psutil.Process(process.pid).memory_info().rss)

        before = asked(count // 3)
        assert asked(count) - before < 16 * 2**20
    finally:
        process.close()
