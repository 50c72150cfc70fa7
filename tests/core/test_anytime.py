"""`improve` and `solve` with a scripted solver process: what callers see, and what is left behind. What runs in the
background disturbs little: a session is as nice as its leader, and modules stay out of collections."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from support.fakes.scripted_solver import all_forwards_first, one_at_a_time
from support.problems import pipeline, stage
from support.processes import hold_timers, over, until

from optpipe import Device, InputError, anytime, improve, solve
from optpipe.anytime import better_start
from optpipe.process import child
from optpipe.process.background import group_as_nice

LIMIT_S = 120  # no search here lasts so long, however busy the machine
SLEEP_S = 55  # a solver that nobody ends sleeps for longer


@pytest.fixture(autouse=True)
def _scripted(scripted_solver, monkeypatch):
    monkeypatch.setattr(child, "ENDING_S", 60)


@pytest.fixture
def problem():
    return pipeline(2, 3, 10, stage(sizes=(1, 1)))


def test_results_get_better_until_proven_and_are_kept_in_the_cache(problem):
    cache = Mock(lookup=Mock(return_value=None))
    search = improve(problem, method="good", cache=cache, time_limit_s=LIMIT_S)
    assert (search.best.status, search.best.lower_bound_ms) == ("unknown", None)
    results = list(search)
    slow, fast = one_at_a_time(problem).makespan_ms, all_forwards_first(problem).makespan_ms
    seen = [(result.method, result.status, result.makespan_ms) for result in results]
    assert seen == [("slow", "feasible", slow), ("fast", "feasible", fast), ("fast", "optimal", fast)]
    assert [results[1].gap, results[2].gap] == [pytest.approx(1 - 1.0 / fast), 0.0]
    assert results[-1].schedule.problem == problem
    added = [(schedule.makespan_ms, *known) for (schedule, *known, _), _ in cache.add.call_args_list]
    assert added == [(slow, "feasible", None), (fast, "feasible", 1.0), (fast, "optimal", fast)]
    assert (search.best.status, search.best.lower_bound_ms) == ("optimal", results[-1].lower_bound_ms)
    unusable = Mock(side_effect=InputError("the cache cannot be used"))
    last = solve(problem, cache=Mock(lookup=unusable, add=unusable), method="worse", time_limit_s=LIMIT_S)
    assert (last.method, last.notes[-1]) == ("fast", "the cache cannot be used")
    assert solve(problem, method="echo", warm_start=one_at_a_time(problem), time_limit_s=LIMIT_S).method == "echo"


@pytest.mark.parametrize(
    ("method", "status", "told"),
    [
        ("infeasible", "infeasible", "device 0 needs 2 bytes and has 1"),
        ("crash", "feasible", "something broke"),
        ("crash at once", "unknown", "exit code 7"),
        ("garbage", "feasible", "the solver's answer"),
        ("half a frame", "feasible", "ended"),
        ("close", "feasible", "support.fakes.scripted_solver closed its output and did not end"),
        ("long", "unknown", "support.fakes.scripted_solver wrote a line of more than 60 bytes"),
    ],
)
def test_a_search_that_ends_early_says_why_and_keeps_the_best(problem, monkeypatch, method, status, told):
    monkeypatch.setattr(child, "ENDING_S", 0.1 if method == "close" else 60)
    if method == "long":
        monkeypatch.setattr(child, "LONGEST_LINE", 60)
    result = solve(problem, method="sleep" if method == "long" else method, time_limit_s=LIMIT_S)
    assert (result.status, result.method) == (status, "slow" if status == "feasible" else "")
    assert told in (result.reason or result.notes[-1])


def test_a_proven_schedule_of_the_cache_is_the_answer(problem):
    fast = all_forwards_first(problem)
    proven = SimpleNamespace(schedule=fast, status="optimal", lower_bound_ms=fast.makespan_ms, source="cache")
    cache = Mock(lookup=Mock(return_value=proven))
    [result] = improve(problem, cache=cache)  # the scripted solver has no method `auto`
    assert (result.status, result.schedule, result.method) == ("optimal", fast, f"{fast.method} (cached)")
    search = improve(problem, cache=cache, method="good", time_limit_s=LIMIT_S)
    assert next(search).method == "slow", "a schedule that is asked for by name is made"
    search.cancel()


def test_a_search_starts_from_the_shorter_of_what_is_known(problem):
    slow, fast = one_at_a_time(problem), all_forwards_first(problem)
    tight = problem.replace(devices=tuple(Device(activation_budget_bytes=1) for _ in problem.devices))
    for given, known, wanted in (slow, fast, fast), (fast, slow, fast), (None, slow, slow):
        assert better_start(problem, given, SimpleNamespace(schedule=known), "makespan") is wanted
    here = replace(slow, problem=tight)
    assert better_start(tight, fast, SimpleNamespace(schedule=here), "makespan") is here, "all forwards do not fit"
    other = all_forwards_first(pipeline(3, 3, 10, stage(sizes=(1, 1))))
    assert better_start(problem, other, SimpleNamespace(schedule=slow), "makespan") is slow


def test_an_invalid_schedule_is_never_seen(problem):
    results = list(improve(problem, method="invalid", time_limit_s=LIMIT_S))
    assert {result.method for result in results} == {"slow"}
    assert any("a schedule of liar was rejected" in note for note in results[-1].notes)
    assert "still here" in results[-1].notes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"time_limit_s": 0}, "improve: time_limit_s = 0: input should be greater than 0"),
        ({"time_limit": 5}, "improve: time_limit is not an option; did you mean time_limit_s?"),
        ({"color": 5}, "improve: color is not an option; expected time_limit_s, gap, "),
        ({"threads": 0}, "improve: threads = 0: input should be greater than or equal to 1"),
        ({"method": "unknown"}, "method = 'unknown': the methods are good and worse"),
        ({"warm_start": "s.json"}, "warm_start is of type str: a Schedule was expected (Schedule.load reads a file)"),
    ],
)
def test_a_wrong_argument_is_named(problem, arguments, message):
    with pytest.raises(InputError) as raised:
        list(improve(problem, **arguments))
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_the_time_limit_is_enforced_on_a_solver_that_forgets_it(problem, monkeypatch):
    started = threading.Event()
    hold_timers(monkeypatch, lambda: started.wait(60))
    monkeypatch.setattr(anytime, "GRACE_S", 0.1)
    search = improve(problem, method="sleep", time_limit_s=0.1)
    assert next(search).method == "slow"
    began = time.monotonic()
    started.set()
    assert [(result.status, result.method) for result in search] == [("feasible", "slow")]
    assert time.monotonic() - began < SLEEP_S


def test_the_time_limit_counts_from_when_the_process_is_ready(problem, monkeypatch):
    """However long it takes to load on a busy machine."""
    seconds = []

    class Noted(threading.Timer):
        def __init__(self, interval, function):
            seconds.append(interval)
            super().__init__(interval, function)

    monkeypatch.setattr(threading, "Timer", Noted)
    search = improve(problem, method="good", time_limit_s=LIMIT_S)
    assert search.ran_s == 0.0
    list(search)
    limit_s = LIMIT_S + anytime.GRACE_S
    assert seconds == [anytime.LOADING_S + limit_s, limit_s]
    assert search.ran_s > 0.0


def test_a_solver_that_is_gone_is_not_killed_again(problem, monkeypatch):
    """By then its process group's number may belong to another process."""
    killed, kill = [], os.killpg
    monkeypatch.setattr(os, "killpg", lambda *what: (killed.append(what), kill(*what)))
    search = improve(problem, method="good", time_limit_s=LIMIT_S)
    list(search)
    search.cancel()
    search._child.close()
    assert len(killed) == 1


def test_cancel_keeps_the_best_so_far(problem):
    search = improve(problem, method="sleep", time_limit_s=LIMIT_S)
    assert next(search).method == "slow"
    threading.Timer(0.1, search.cancel).start()
    began = time.monotonic()
    last = list(search)[-1]
    assert (last.method, last.notes) == ("slow", ())
    assert time.monotonic() - began < SLEEP_S


def test_a_search_in_a_reference_cycle_leaves_no_process_and_no_open_file(problem, recwarn):
    search = improve(problem, method="sleep", time_limit_s=LIMIT_S)
    next(search)
    for timer in [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]:
        timer.cancel()  # its thread holds the child
        timer.join()
    search.itself = search
    pid = search._child._process.pid
    del search
    gc.collect()
    assert [str(warning.message) for warning in recwarn if "unclosed" in str(warning.message)] == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_solver_that_cannot_be_started_leaves_no_open_file(problem, monkeypatch, recwarn):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    gc.collect()
    recwarn.clear()  # what other tests left
    with pytest.raises(FileNotFoundError):
        improve(problem)
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []


def test_the_solver_dies_with_its_parent(problem, tmp_path):
    script = (
        "import sys, time; from optpipe import Problem, improve, solvers\n"
        "solvers.installed().SEARCH = 'support.fakes.scripted_solver'\n"
        f"search = improve(Problem.load({str(tmp_path / 'p.json')!r}), method='sleep', time_limit_s={LIMIT_S})\n"
        "next(search); print(search._child._process.pid, flush=True); time.sleep(60)"
    )
    problem.save(tmp_path / "p.json")
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.send_signal(signal.SIGKILL)
    until(lambda: over(pid), "the solver ends with its parent", within_s=40)  # well before it would by itself


LEADER = "import os, sys; os.nice(7); print(flush=True); sys.stdin.read()"
SERVICE = """
import gc, os, optpipe_server
def ready(url):
    print(gc.get_freeze_count(), flush=True)
    os._exit(0)
settings = optpipe_server.Settings("sqlite:///jobs.sqlite", processes=1, solves=0)
optpipe_server.serve(settings, port=0, ready=ready)
"""
POOL = "import gc, optpipe_server.pool.warm; print(gc.get_freeze_count())"


@pytest.mark.parametrize("code", [SERVICE, POOL], ids=["the service", "its pool"])
def test_the_heap_is_frozen_when_the_process_answers(code: str, tmp_path: Path) -> None:
    told = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert int(told.stdout) > 50_000, "objects, most of them of modules"


def test_a_session_is_as_nice_as_its_leader() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LEADER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as leader:
        leader.stdout.readline()
        group_as_nice(leader.pid)
        group = Path(f"/proc/{leader.pid}/autogroup")  # only where the kernel groups sessions
        if group.exists():
            text = group.read_text().partition(" ")[2].strip()
            assert text in (f"nice {os.getpriority(os.PRIO_PROCESS, leader.pid)}", "")
        leader.kill()
    group_as_nice(leader.pid)  # the process has ended: nothing happens
