"""`optpipe worker`, its health and its metrics, and a database that goes away."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from support.service import client_at
from support.service.postgres import Postgres
from support.service.work import Work, problem, sound
from support.until import until

from optpipe import InputError
from optpipe_server.database import Database, InitialResult, Jobs, NewJob
from optpipe_server.settings import Settings
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
            assert process.stderr is not None
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
            assert process.stderr is not None
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
