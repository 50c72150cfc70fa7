"""`optpipe worker`, a database that goes away, and children and workers that are killed: nothing is lost or left."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select
from support.processes import over, until
from support.service import client_at
from support.service.postgres import Postgres
from support.service.work import Work, problem, sound
from support.service.worker_process import WorkerProcess, worker_process

from optpipe import InputError
from optpipe.process import process_tree
from optpipe_server import Settings
from optpipe_server.database import Database, InitialResult, Jobs, NewJob
from optpipe_server.database.tables import jobs
from optpipe_server.work import worker

pytestmark = pytest.mark.usefixtures("fake_solver")
OPTPIPE = [sys.executable, "-m", "optpipe_cli"]


def test_sqlite_is_refused_in_one_sentence(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'file'}"
    done = subprocess.run([*OPTPIPE, "worker", "--database", url], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(
        f"error: database = '{url}': a worker shares it with other processes"
    )
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_unusable_address_is_refused(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.signal, "signal", lambda *_: None)
    with pytest.raises(InputError, match=r"metrics_host = '192.0.2.1', metrics_port = 1: "):
        worker.work(Settings(database=postgres_url), "worker", "192.0.2.1", 1)


@contextmanager
def started(url: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The real command with the real solver in an empty environment, and its URL."""
    command = [*OPTPIPE, "worker", "--metrics-port", "0", "--threads", "1", "--log-json"]
    environment = {"OPTPIPE_DATABASE": url, "HOME": str(folder)}
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            lines = map(json.loads, process.stderr)
            port = next(line["port"] for line in lines if line["event"] == "metrics")
            threading.Thread(target=lambda: [None for _ in lines], daemon=True).start()
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def test_the_command_works_and_ends_when_told(postgres_url: str, tmp_path: Path) -> None:
    database = Database(postgres_url)
    jobs = Jobs(database)
    job_id, _ = jobs.add(NewJob(problem()), InitialResult(), most_open=10)
    with started(postgres_url, tmp_path) as (process, url):
        until(lambda: jobs.job(job_id).status == "optimal")
        client = client_at(url)
        health = client.get("/healthz").json()
        assert (health["status"], health["database"]) == ("ok", "ok")
        # The metric is counted after the job's end is stored.
        until(lambda: 'optpipe_solve_seconds_count{state="done"} 1.0' in client.get("/metrics").text)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        with pytest.raises(httpx.ConnectError):
            client.get("/healthz")
        client.close()
    database.close()


@contextmanager
def away(postgres: Postgres, how: signal.Signals = signal.SIGINT) -> Iterator[None]:
    postgres.stop(how)
    try:
        yield
    finally:
        postgres.start()


def test_a_worker_waits_for_a_database_that_is_not_there_yet(postgres: Postgres) -> None:
    command = [*OPTPIPE, "worker", "--log-json", "--database"]
    with postgres.database("migrated") as url, ExitStack() as stack:
        with away(postgres):
            process = stack.enter_context(subprocess.Popen([*command, url], stderr=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            events = (json.loads(line)["event"] for line in process.stderr)
            assert next(events) == "waiting for the database"
        assert "works" in events  # some time
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.parametrize("how", [signal.SIGQUIT, signal.SIGINT], ids=["crash", "restart"])
def test_a_database_outage_loses_nothing(
    postgres: Postgres, postgres_url: str, tmp_path: Path, how: signal.Signals
) -> None:
    work = Work(Database(postgres_url), tmp_path)
    with work.worker():
        job_id, waiting = work.submit("steps", problem(m=30)), work.submit("prove", priority=-1)
        work.found(job_id, 3)
        before = sound(work.database)[job_id]
        with away(postgres, how):
            time.sleep(1.0)
        for each in (job_id, waiting):
            job = work.ended(each)
            assert (job.state, job.status, job.crashes) == ("done", "optimal", 0)
    assert sound(work.database)[job_id][: len(before)] == before
    work.database.close()


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
    job_id = work.submit("steps", problem(m=150), time_limit_s=500.0)  # of all attempts together
    with worker_process(postgres_url, "stopped", tmp_path / "cache") as worker:
        work.found(job_id, 3)
        os.kill(worker.process.pid, signal.SIGSTOP)
        with worker_process(postgres_url, "next", tmp_path / "cache"):
            until(lambda: work.job(job_id).worker == "next")
            os.kill(worker.process.pid, signal.SIGCONT)
            until(lambda: len(worker.children) <= 1)  # it has let go
            job = work.ended(job_id)
    assert (job.state, job.status, job.attempt) == ("done", "optimal", 1 + job.losses)
    assert job.attempt >= 2  # on a busy machine the next one may be late, too
    assert [row.attempt for row in sound(work.database)[job_id]][-1] == job.attempt
    work.database.close()
