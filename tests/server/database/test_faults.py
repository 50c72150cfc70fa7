"""A full or read-only disk, and a PostgreSQL that goes away: an error, no false acknowledgement, and recovery
afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from support.jobs import FAST, A, found, row, submit
from support.postgres import NOBODY, Postgres

from optpipe.errors import InputError
from optpipe_server.database import Database, Jobs, Leases
from optpipe_server.database.keys import Keys

TESTS = Path(__file__).parents[2]


def whole(database: Database, acknowledged: set[str]) -> bool:
    """Return whether exactly these jobs are stored, each with its schedule."""
    jobs = Jobs(database)
    known = jobs.page(A, None, None, 200)
    assert len(known) < 200
    assert all(len(jobs.incumbents(job.id)) == job.last_seq == 1 for job in known)
    return {job.id for job in known} == acknowledged


SUBMITS = """
import os, resource, sys
from sqlalchemy.exc import SQLAlchemyError
from support.jobs import submit
from optpipe_server.database import Database
database = Database(sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    what, _, number = line.strip().partition(" ")
    if what == "room":  # the longest file that this process can write, in bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(number), resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    if what == "user":  # from now on
        os.setuid(int(number))
        database.engine.dispose()  # whose connections were opened as another
    for _ in range(int(number) if what == "submit" else 0):
        try:
            print(submit(database), flush=True)
        except SQLAlchemyError as error:
            print("refused:", str(error.orig), flush=True)
"""


class Submitter:
    """A process that submits jobs and reports which were acknowledged."""

    def __init__(self, url: str) -> None:
        paths = os.pathsep.join([str(TESTS), *sys.path])
        command = [sys.executable, "-c", SUBMITS, url]
        self._process = subprocess.Popen(
            command, text=True, stdin=-1, stdout=-1, env={**os.environ, "PYTHONPATH": paths}
        )
        assert self._read() == "ready"

    def __enter__(self) -> Submitter:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def submit(self, number: int) -> list[str]:
        self.tell(f"submit {number}")
        return [self._read() for _ in range(number)]

    def kill(self) -> list[str]:
        """Kill it; return its output that was not read yet."""
        self._process.kill()
        return [line for line in self._process.communicate()[0].splitlines() if len(line) == 32]


def test_a_disk_that_fills_up_during_a_write(tmp_path: Path, sqlite_url: str) -> None:
    with Submitter(sqlite_url) as submitter:
        acknowledged = {*submitter.submit(3)}
        submitter.tell(f"room {(tmp_path / 'service.sqlite-wal').stat().st_size + 30_000}")
        answers = submitter.submit(20)
        refused = [answer for answer in answers if answer.startswith("refused:")]
        acknowledged |= {*answers} - {*refused}
        assert {*refused} == {"refused: disk I/O error"}
        submitter.tell(f"room {2**40}")
        [last] = submitter.submit(1)
        acknowledged.add(last)
    database = Database(sqlite_url)
    assert whole(database, acknowledged)
    with database.read() as db:
        assert db.execute(text("pragma integrity_check")).scalar_one() == "ok"
    database.close()


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that a process of another user can reach."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def test_a_file_that_is_read_only(shared_folder: Path) -> None:
    file = shared_folder / "jobs.sqlite"
    with Submitter(f"sqlite:///{file}") as submitter:
        acknowledged = {*submitter.submit(2)}

        def protect(mode: int) -> None:
            for path in shared_folder.glob("jobs.sqlite*"):
                path.chmod(mode)

        protect(0o444)
        submitter.tell(f"user {os.geteuid() or NOBODY}")
        assert {*submitter.submit(3)} == {"refused: attempt to write a readonly database"}
        protect(0o666)
        acknowledged |= {*submitter.submit(2)}
    database = Database(f"sqlite:///{file}")
    assert whole(database, acknowledged)
    database.close()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["ended", "crashed"])
def test_a_postgresql_that_goes_and_comes_back(postgres: Postgres, postgres_url: str, how: signal.Signals) -> None:
    """Three threads submit all the time. What was acknowledged is there after the outage, and the first request after
    it works, even on a connection that was idle during the outage."""
    database, asleep = Database(postgres_url), Database(postgres_url)
    job_id = submit(database)
    claim = Leases(database, "w").claim()
    assert claim is not None
    acknowledged, lock = {job_id}, threading.Lock()
    over = threading.Event()

    def client() -> None:
        while not over.is_set():
            try:
                new = submit(database)
            except SQLAlchemyError:
                over.wait(0.01)
                continue
            with lock:
                acknowledged.add(new)

    threads = [threading.Thread(target=client) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        while len(acknowledged) < 20:
            over.wait(0.01)
        postgres.stop(how)
        over.set()
        for thread in threads:
            thread.join()
        for write in (
            lambda: submit(database),
            lambda: Leases(database, "w").append(claim, found(FAST)),
            lambda: Leases(database, "w").renew([(claim, 1.0)]),
            lambda: Keys(database).create("a", ["read"]),
            lambda: Jobs(database).job(A, job_id),
        ):
            with pytest.raises(SQLAlchemyError):
                write()
        with pytest.raises(InputError, match="PGSQL"):
            Database(postgres_url)
    finally:
        over.set()
        postgres.start()
    assert {*Jobs(asleep).versions(acknowledged)} == {*Jobs(database).versions(acknowledged)} == acknowledged
    asleep.close()
    assert Leases(database, "w").append(claim, found(FAST)), "the lease outlived it"
    assert row(database, job_id).last_seq == 2
    submit(database)
    database.close()
