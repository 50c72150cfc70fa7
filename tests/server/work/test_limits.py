"""Three layers of time limits, each tested with a solver that ignores the former one; memory limits; threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.fakes.solver import SLEEP
from support.processes import over
from support.service.work import Work, problem, sound, start
from support.until import until

from optpipe import Problem, anytime, solvers
from optpipe.process import process_tree
from optpipe_server.work import solve
from optpipe_server.work.solve import resident_bytes
from optpipe_server.work.solves import ThreadBudget
from optpipe_solver.heuristics import generate

pytestmark = pytest.mark.usefixtures("fake_solver")
NEVER_S = 1000.0
FAR_FROM_PROVEN = Path(__file__).parents[3] / "examples/problems/slowlink-8x16-parts4.json"  # by 20 % after 10 s


@pytest.mark.parametrize(
    ("method", "deaf", "grace_s", "late_s"),
    [
        ("auto", False, NEVER_S, NEVER_S),  # the real solver ends itself
        ("hang", False, 0.2, NEVER_S),  # this one does not: `improve` ends it
        ("hang", True, 0.2, NEVER_S),  # nor does it hear that its input closes
        (
            "escaped",
            True,
            0.2,
            1.0,
        ),  # it ends, and what it started keeps the pipe open: the watch ends the process tree
    ],
)
def test_a_search_ends_in_time(
    local: Work, monkeypatch: pytest.MonkeyPatch, method: str, deaf: bool, grace_s: float, late_s: float
) -> None:
    if method == "auto":
        monkeypatch.setattr(solvers.installed(), "SEARCH", "optpipe_solver")
    if deaf:
        monkeypatch.setenv("DEAF", "1")
    monkeypatch.setattr(anytime, "GRACE_S", grace_s)
    monkeypatch.setattr(solve, "LATE_S", late_s)
    posed = Problem.load(FAR_FROM_PROVEN) if method == "auto" else problem()
    # With a schedule to start from, because a search on a busy machine may find none.
    job_id = local.submit(method, posed, time_limit_s=2.0, start=start(generate("naive", posed)))
    with local.worker():
        job = local.ended(job_id)
        assert (job.state, job.status, job.crashes) == ("done", "feasible", 0)
        assert process_tree.members(process_tree.OWN) == []


def test_an_allocation_bomb_is_ended_and_the_service_lives(local: Work) -> None:
    job_id, other = local.submit("bomb"), local.submit("prove")
    with local.worker(memory_mib=256):
        job = local.ended(job_id)
        assert (job.state, job.crashes, job.last_seq) == ("done", 2, 1)
        assert "memory_mib" in job.reason
        assert local.ended(other).status == "optimal"
    sound(local.database)


def test_memory_is_counted_with_child_processes() -> None:
    mark = process_tree.new_mark()
    start = "subprocess.run([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
    code = f"import subprocess, sys; held = bytearray(b'x') * 2**25; {start}"
    inner = "import time; held = bytearray(b'x') * 2**25; time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code, inner], env=process_tree.environment(mark)):
        until(lambda: sum(map(resident_bytes, process_tree.members(mark))) > 2**26)
        assert len(process_tree.members(mark)) == 2
        assert process_tree.end(mark) == 2
    assert process_tree.members(mark) == []


def test_all_descendants_are_ended() -> None:
    mark, others = process_tree.new_mark(), process_tree.new_mark()
    orphan = f"import subprocess; subprocess.Popen({SLEEP!r}, start_new_session=True)"
    subprocess.run([sys.executable, "-c", orphan], env=process_tree.environment(mark), check=True)
    with subprocess.Popen(SLEEP, env=process_tree.environment(others)) as stranger:
        (pid,) = until(lambda: process_tree.members(mark))
        os.kill(pid, 19)  # SIGSTOP
        assert process_tree.end(mark) == 1
        until(lambda: over(pid))
        assert not over(stranger.pid)
        process_tree.end(others)


def test_threads_are_shared_among_searches() -> None:
    threads = ThreadBudget(8, 3)
    first = threads.take()
    assert (first, threads.take(), threads.take()) == (6, 1, 1)
    threads.give_back(first)
    assert threads.take(most=2) == 2
    threads.give_back(2)
    assert threads.take() == 6
    few = ThreadBudget(2, 4)
    assert [few.take() for _ in range(4)] == [1, 1, 1, 1]


def test_a_fork_has_marks_of_its_own() -> None:
    code = "import os; from optpipe.process import process_tree; before = process_tree.OWN; pid = os.fork()"
    code += "; pid and os.waitpid(pid, 0); print(process_tree.OWN == before, flush=True)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert told == ["False", "True"], "the fork has others, and who forked keeps its own"
