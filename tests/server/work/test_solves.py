"""What happens to a worker's jobs, its metrics, three layers of time limits, limits of memory and threads."""

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from support.fakes.solver import SLEEP
from support.problems.chain import gpipe, one_by_one
from support.processes import hold_timers, over, until
from support.service.postgres import on_sqlite
from support.service.work import Work, problem, sound, start

from optpipe import Problem, Result, anytime, solvers
from optpipe.process import process_tree
from optpipe_server.database import InitialResult, Searches
from optpipe_server.database.changes import MissingError, StaleError
from optpipe_server.database.jobs import options_of
from optpipe_server.metrics import REGISTRY
from optpipe_server.settings import Settings
from optpipe_server.work import Rounds, solve
from optpipe_solver.heuristics import generate

pytestmark = pytest.mark.usefixtures("fake_solver")


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"optpipe_{name}", labels) or 0.0


def test_jobs_are_solved_and_their_schedules_kept(work: Work) -> None:
    proven, impossible, refused = work.submit("prove"), work.submit("infeasible"), work.submit("unknown", problem(2.0))
    with work.worker() as worker:
        worker.nudge()
        job = work.ended(proven)
        assert (job.state, job.status, job.last_seq, job.gap, job.reason) == ("done", "optimal", 2, 0.0, None)
        assert 0 < job.spent_s < 60
        job = work.ended(impossible)
        assert (job.state, job.status) == ("infeasible", "infeasible")
        assert job.reason == "device 0 needs 2000 bytes and has 1000"
        job = work.ended(refused)
        assert (job.state, job.reason, job.crashes) == ("failed", "method = 'unknown': there is none of that name", 0)
    lengths = [make(problem()).makespan_ms for make in (one_by_one, gpipe)]
    assert [row.makespan_ms for row in sound(work.database)[proven]] == lengths
    hit = work.cache.open().lookup(problem())
    assert (hit.status, hit.schedule.makespan_ms) == ("optimal", gpipe(problem()).makespan_ms)


def test_a_cancelled_job_keeps_its_best_and_a_proof_that_came_first(work: Work) -> None:
    running, waiting = work.submit("hang"), work.submit("hang")
    with work.worker(solves=1) as worker:
        work.found(running)
        (search,) = worker.solves.running()
        work.jobs.cancel(waiting)
        work.jobs.cancel(running)
        job = work.ended(running)
        assert (job.state, job.last_seq, job.reason) == ("cancelled", 1, "the job was cancelled")
        assert (work.job(waiting).state, work.job(waiting).attempt) == ("cancelled", 0)
        until(lambda: not worker.solves.running())
        proven = work.submit("prove")
        work.ended(proven)
        work.jobs.cancel(proven)
        search.end("cancelled")  # as late as can be
    assert (work.job(proven).state, work.job(proven).status) == ("done", "optimal")


def test_drifted_costs_and_more_time_reach_a_running_job(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anytime, "GRACE_S", 0.1)
    more = threading.Event()
    hold_timers(monkeypatch, lambda: more.wait(60))  # its first second is not over before it gets more
    drifting, extended = work.submit("steps"), work.submit("hang", time_limit_s=1.0)
    with work.worker():
        until(lambda: work.job(extended).state == "running")
        while options_of(work.job(extended)).time_limit_s < 40.0:
            with suppress(StaleError):  # where a schedule is found at that moment
                work.jobs.extend(extended, 40.0, work.job(extended).version)
        more.set()
        first_s = work.job(extended).spent_s
        work.found(drifting)
        while work.job(drifting).problem_version == 1 and work.job(drifting).state == "running":
            with suppress(StaleError):  # or another one
                work.jobs.change_problem(
                    drifting, problem(3.0), InitialResult(), seen=work.job(drifting).last_seq, most_open=10
                )
        job = work.ended(drifting)
        assert (job.state, job.status) == ("done", "optimal")
        assert (job.problem_version, job.problem_sha256) == (2, problem(3.0).sha256)
        until(lambda: work.job(extended).spent_s > first_s + 2.0)
        assert work.job(extended).state == "running"
    rows = sound(work.database)[drifting]
    assert rows[-1].makespan_ms == gpipe(problem(3.0)).makespan_ms
    assert {row.problem_version for row in rows} == {1, 2}


@on_sqlite
def test_a_job_ends_at_its_gap_and_needs_no_search_where_it_has_that(work: Work) -> None:
    schedule = gpipe(problem())
    near = Result("feasible", schedule, lower_bound_ms=0.96 * schedule.makespan_ms)
    reached, given = work.submit("bound", gap=0.1), work.submit("hang", gap=0.1, start=InitialResult(near))
    before = counted("gap_count"), counted("gap_sum")
    with work.worker() as worker:
        for job_id in (reached, given):
            job = work.ended(job_id)
            assert (job.state, job.status) == ("done", "feasible")
            assert 0 < job.gap < 0.1
        until(lambda: not worker.solves.running())
    assert work.job(given).last_seq == 1
    assert counted("gap_count") == before[0] + 2
    assert counted("gap_sum") == pytest.approx(before[1] + work.job(reached).gap + work.job(given).gap)


@on_sqlite
def test_a_bound_that_rises_is_told_while_the_search_goes_on(work: Work) -> None:
    length = gpipe(problem()).makespan_ms
    rising = work.submit("bounds")
    with work.worker():
        until(lambda: (work.job(rising).lower_bound_ms or 0.0) > 0.8 * length)
        assert work.job(rising).state == "running"
        work.jobs.cancel(rising)
        job = work.ended(rising)
    assert (job.value_ms, job.lower_bound_ms) == (length, pytest.approx(0.9 * length))
    told = [bound.lower_bound_ms for bound in work.jobs.bounds(rising)]
    assert told[-1] == job.lower_bound_ms
    assert all(above > below * (1 + solve.RISE) for below, above in pairwise(told))


def test_a_crash_is_tried_once_more_from_the_best(work: Work) -> None:
    crashed, at_once = work.submit("crash later"), work.submit("crash")
    before = counted("solver_crashes_total")
    with work.worker():
        job = work.ended(crashed)
        assert (job.state, job.status, job.attempt, job.crashes, job.last_seq) == ("done", "feasible", 2, 2, 1)
        job = work.ended(at_once)
        assert (job.state, job.attempt, job.crashes, job.last_seq) == ("failed", 2, 2, 0)
        assert job.reason.endswith("ended with exit code 1: boom")
    assert sum("exit code -6" in line for line in work.lines(crashed)) == 3  # and why it ended
    assert counted("solver_crashes_total") == before + 4


def test_invalid_and_worse_schedules_are_rejected_and_counted(local: Work) -> None:
    crashes = {"invalid": 0, "worse": 0, "garbage": 2, "half a frame": 2, "endless line": 2}
    before = counted("rejected_schedules_total")
    ids = {method: local.submit(method) for method in crashes}
    with local.worker():
        for method, job_id in ids.items():
            job = local.ended(job_id)
            assert (job.state, job.crashes) == ("done", crashes[method])
            rejections = sum("rejected schedules" in line for line in local.lines(job_id))
            assert rejections == max(1, crashes[method])
    assert "a schedule of liar was rejected: 0F1 is missing" in local.lines(ids["invalid"])
    # Once per attempt, and once in the line that tells why the job ended.
    assert sum("wrote a line of more than 67108864 bytes" in line for line in local.lines(ids["endless line"])) == 3
    assert counted("rejected_schedules_total") == before + 9  # `worse` writes two that are no better
    sound(local.database)


def test_a_worker_that_is_stopped_gives_its_jobs_back(work: Work) -> None:
    hanging, steps = work.submit("hang"), work.submit("steps")
    with work.worker("first") as worker:
        work.found(hanging)
        work.found(steps, 2)
        began = time.monotonic()
        worker.stop(20.0)
        assert time.monotonic() - began < 20.0
    assert {work.job(hanging).state, work.job(steps).state} <= {"queued", "done"}
    job = work.job(hanging)
    assert (job.state, job.worker, job.last_seq, job.losses) == ("queued", None, 1, 0)
    assert job.spent_s > 0
    with work.worker("second"):
        assert work.ended(steps).status == "optimal"
        until(lambda: work.job(hanging).worker == "second")
        work.jobs.cancel(hanging)
        assert work.ended(hanging).attempt == 2
    sound(work.database)


def test_a_purged_job_is_abandoned(work: Work, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    job_id = work.submit("pid", problem(name=str(file)))
    with work.worker() as worker:
        work.found(job_id)
        pid = int(file.read_text())
        assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0), "as urgent as all else"
        work.jobs.purge(job_id)
        until(lambda: not worker.solves.running() and over(pid))
    with pytest.raises(MissingError):
        work.job(job_id)


def test_limits_reach_the_solver_and_a_job_has_no_more_than_its_worker(local: Work) -> None:
    less, more = (local.submit("tells", time_limit_s=20.0, threads=t, memory_mib=m) for t, m in ((2, 400), (64, 4000)))
    with local.worker(solves=1, threads=8, memory_mib=800):
        local.ended(less)
        local.ended(more)
    assert "threads 2, memory 350, 20 s" in local.lines(less)
    assert "threads 8, memory 700, 20 s" in local.lines(more)
    assert [line for line in local.lines(less) + local.lines(more) if "the search gets" in line] == [
        "threads = 64: the search gets 8 on this worker",
        "memory_mib = 4000: the search gets 800 on this worker",
    ]


@on_sqlite
def test_a_job_whose_thread_could_not_be_started_is_not_held(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system refuses another thread, the slot is free again and the job waits."""
    start, refused = threading.Thread.start, []

    def sometimes(thread: threading.Thread) -> None:
        if thread.name.startswith("solve") and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", sometimes)
    first = work.submit("prove")
    with work.worker(solves=1):
        job = work.ended(first)
    assert (job.state, job.attempt, job.losses, len(refused)) == ("done", 2, 0, 1)


def test_a_job_that_another_worker_has_is_left_to_it(work: Work) -> None:
    lost = counted("lost_workers_total")
    held = work.submit("hang")
    with work.worker() as worker:
        work.found(held)
        claim = Searches(work.database, "another").begin(held)
        assert claim.attempt == 2
        assert counted("lost_workers_total") == lost + 1
        until(lambda: [solve.claim.attempt for solve in worker.solves.running()] != [1])


def test_a_round_that_fails_is_not_the_last() -> None:
    failures, rounds = [ValueError("unheard of")], []

    def act() -> None:
        rounds.append(1)
        if failures:
            raise failures.pop()

    thread = Rounds("test", "it cannot be done", 0.01, act)
    thread.start()
    until(lambda: len(rounds) > 2)
    thread.stop()


NEVER_S = 1000.0
FAR_FROM_PROVEN = Path(__file__).parents[3] / "examples/problems/slowlink-8x16-parts4.json"  # by 20 % after 10 s


@pytest.mark.parametrize(
    ("method", "deaf", "grace_s", "late_s"),
    [
        ("auto", False, NEVER_S, NEVER_S),  # the real solver ends itself
        ("hang", False, 0.2, NEVER_S),  # this one does not: `improve` ends it
        ("hang", True, 0.2, NEVER_S),  # nor does it hear that its input closes
        # It ends, and what it started keeps the pipe open: the watch ends the process tree.
        ("escaped", True, 0.2, 1.0),
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
        until(lambda: process_tree.resident_bytes(process_tree.members(mark)) > 2**26)
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


@pytest.mark.parametrize(("threads", "solves", "each"), [(8, 3, 2), (2, 4, 1), (8, 0, 8)])
def test_searches_share_threads_equally(threads: int, solves: int, each: int) -> None:
    assert Settings(threads=threads, solves=solves).threads_each == each


def test_a_fork_has_marks_of_its_own() -> None:
    code = "import os; from optpipe.process import process_tree; before = process_tree.OWN; pid = os.fork()"
    code += "; pid and os.waitpid(pid, 0); print(process_tree.OWN == before, flush=True)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert told == ["False", "True"], "the fork has others, and who forked keeps its own"
