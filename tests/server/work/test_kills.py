"""Children and workers that are killed or stopped at any moment: nothing is lost, and no process is left behind."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from sqlalchemy import select
from support.processes import over
from support.service.work import Work, problem, sound
from support.service.worker_process import WorkerProcess, worker_process
from support.until import until

from optpipe.process import process_tree
from optpipe_server.database import Database
from optpipe_server.database.tables import jobs

pytestmark = pytest.mark.usefixtures("fake_solver")
RECLAIMED_S = 60.0  # the machine may be busy
ORPHANED_S = 60.0
OPEN = 8  # jobs at most that are not over when something is killed

rounds = pytest.mark.parametrize("rounds", [1, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])


@pytest.fixture
def beside(database_url: str, tmp_path: Path) -> Iterator[Work]:
    """A client's view of the database, besides the worker's process."""
    writer = Database(database_url)
    database = Database(database_url, secondary=True)
    writer.close()  # and with it SQLite's lock
    yield Work(database, tmp_path)
    database.close()


@contextmanager
def never_worse(work: Work) -> Iterator[None]:
    """Check that jobs, incumbents and the best ones are no worse after the block."""
    before = sound(work.database, OPEN)
    yield
    after = sound(work.database, OPEN)
    for job_id, rows in before.items():
        assert after[job_id][: len(rows)] == rows


@rounds
def test_a_killed_solver_loses_nothing(work: Work, rounds: int) -> None:
    dice = random.Random(1)
    with work.worker():
        for _ in range(rounds):
            job_id = work.submit("steps", problem(m=20))
            time.sleep(dice.uniform(0.0, 1.5))
            with never_worse(work):
                for pid in process_tree.members(process_tree.OWN):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            job = work.ended(job_id)
            assert (job.state, job.status) == ("done", "optimal")
            assert job.crashes <= 1
    assert len(sound(work.database)) == rounds


@rounds
def test_a_killed_worker_loses_nothing(beside: Work, database_url: str, tmp_path: Path, rounds: int) -> None:
    dice, submitted, waited_s = random.Random(2), [], [0.0]
    for number in range(rounds):
        submitted += [beside.submit("steps", problem(m=20)) for _ in range(2)]
        with worker_process(database_url, f"worker {number}", tmp_path / "cache") as worker:
            killed = time.monotonic()
            until(lambda: [row for row in running(beside) if row.worker == f"worker {number}"])  # noqa: B023 (called at once)
            if number:
                waited_s.append(time.monotonic() - killed)
            time.sleep(dice.uniform(0.0, 1.0))
            with never_worse(beside):
                worker.kill()
            gone(worker)
    with worker_process(database_url, "the last", tmp_path / "cache"):
        for job_id in submitted:
            job = beside.ended(job_id)
            assert job.state == "done" or job.losses > 5
            assert job.status == "optimal" or job.losses > 5
    sound(beside.database)
    assert max(waited_s) < RECLAIMED_S


def running(work: Work) -> list[object]:
    with work.database.read() as db:
        return list(db.execute(select(jobs).where(jobs.c.state == "running")))


def gone(worker: WorkerProcess) -> None:
    until(lambda: not worker.children, f"the end of {worker.children}", ORPHANED_S)


def test_no_child_survives_its_worker(beside: Work, database_url: str, tmp_path: Path) -> None:
    job_id = beside.submit("tree")
    with worker_process(database_url, "worker", tmp_path / "cache", deaf=True) as worker:
        beside.found(job_id)
        # The process that ends the process tree, a solver, and its children.
        children = until(lambda: len(worker.children) >= 4 and worker.children)
        for pid in children[1:]:  # all but the process that ends the process tree
            os.kill(pid, signal.SIGSTOP)
        worker.kill()
        gone(worker)
        until(lambda: all(over(pid) for pid in children))


def test_a_worker_that_was_stopped_leaves_its_job_to_the_next(postgres_url: str, tmp_path: Path) -> None:
    work = Work(Database(postgres_url), tmp_path)
    job_id = work.submit("steps", problem(m=150))
    with worker_process(postgres_url, "stopped", tmp_path / "cache") as worker:
        work.found(job_id, 3)
        os.kill(worker.process.pid, signal.SIGSTOP)
        with worker_process(postgres_url, "next", tmp_path / "cache"):
            until(lambda: work.job(job_id).worker == "next")
            os.kill(worker.process.pid, signal.SIGCONT)
            until(lambda: len(worker.children) <= 1)  # it has let go
            job = work.ended(job_id)
    assert (job.state, job.status, job.attempt, job.losses) == ("done", "optimal", 2, 1)
    assert [row.attempt for row in sound(work.database)[job_id]][-1] == 2
    work.database.close()
