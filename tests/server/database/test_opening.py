"""Databases of both kinds are opened and refused; connections to PostgreSQL that time out, are lost or are replaced."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, select, text, update
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from support.service.postgres import Postgres
from support.service.work import row, submit

from optpipe import InputError
from optpipe_server.database import AwayError, Database, Searches
from optpipe_server.database import postgres as of_postgres
from optpipe_server.database.tables import jobs


def test_sqlite_is_durable_and_locks_at_the_start_of_a_write(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    with database.read() as db:
        told = [
            db.execute(text(f"pragma {name}")).scalar_one() for name in ("journal_mode", "synchronous", "foreign_keys")
        ]
    assert told == ["wal", 2, 1], "2 is FULL"
    other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), timeout=0, isolation_level=None)
    with closing(other), database.write(), pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("begin immediate")
    database.close()


OPEN = "import sys; from optpipe_server.database import Database; Database(sys.argv[1]).close(); print('opened')"


def test_processes_that_create_the_tables_at_once(postgres: Postgres) -> None:
    with postgres.database() as url:
        command = [sys.executable, "-c", OPEN, url]
        started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(2)]
        assert [process.communicate()[0].decode() for process in started] == ["opened\n"] * 2


def test_a_file_has_one_process(tmp_path: Path, sqlite_url: str) -> None:
    database = Database(sqlite_url)
    (tmp_path / "link").symlink_to(tmp_path / "service.sqlite")
    for url in (sqlite_url, f"sqlite:///{tmp_path / 'link'}"):
        with pytest.raises(InputError, match="another process has it; processes can share a PostgreSQL database"):
            Database(url)
    ended = subprocess.run([sys.executable, "-c", OPEN, sqlite_url], capture_output=True, text=True)
    assert "another process has it" in ended.stderr
    database.close()
    Database(sqlite_url).close()
    assert {file.stat().st_mode & 0o777 for file in tmp_path.glob("service*")} == {0o600}, "of its user only"


def test_a_secondary_opens_the_file_of_another_process(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    beside = Database(sqlite_url, secondary=True)
    job_id = submit(beside)
    assert row(database, job_id).id == job_id
    beside.close()
    with pytest.raises(InputError, match="another process has it"):
        Database(sqlite_url)
    database.close()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:geheim@127.0.0.1:1/name",
        "postgresql://user@127.0.0.1:1/name?password=geheim",
        "postgresql://user:ge@heim@127.0.0.1:1/name",
        "postgresql://user:geheim@127.0.0.1:port/name",
        "postgresql://user:geheim@127.0.0.1:1",
        "postgresql://user:geheim@127.0.0.1:1/name?nonsense=1",
        "mysql://user:geheim@127.0.0.1/name",
        "geheim",
        "",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite://geheim.db",
        "sqlite:////nowhere/at/all.db",
        "sqlite:////",
        "sqlite:////tmp/file?mode=ro",
    ],
)
def test_the_error_for_a_wrong_url_has_no_password(url: str) -> None:
    with pytest.raises(InputError) as refused:
        Database(url)
    said = str(refused.value)
    assert isinstance(refused.value, AwayError) or "Connection refused" not in said
    assert said.startswith("database")
    assert "\n" not in said
    assert not any(part in said for part in ("geheim", "heim@") if url.startswith(("postgresql", "mysql")))


def test_the_error_for_a_file_that_is_not_a_database_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is not a database " * 100)
    with pytest.raises(InputError, match="file is not a database"):
        Database(f"sqlite:///{tmp_path / 'text'}")
    with pytest.raises(InputError, match="unable to open database file"):
        Database(f"sqlite:///{tmp_path}")


def test_a_process_stopped_in_a_transaction_does_not_block_its_job(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(of_postgres.OPTIONS, "idle_in_transaction_session_timeout", 3000)
    stopped, other = Database(postgres_url), Database(postgres_url)
    job_id = submit(other)
    holds, go_on = threading.Event(), threading.Event()
    failed: list[Exception] = []

    def hold() -> None:
        try:
            with stopped.write() as db:
                db.execute(select(jobs).where(jobs.c.id == job_id).with_for_update())
                db.execute(update(jobs).values(spent_s=99.0))
                holds.set()
                go_on.wait(60)
                db.execute(update(jobs).values(spent_s=99.0))
        except SQLAlchemyError as error:
            failed.append(error)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holds.wait(60)
    claim = Searches(other, "w").begin(job_id)  # waits until the server has ended the other's transaction
    go_on.set()
    thread.join()
    assert len(failed) == 1, "and nothing of it was written"
    assert claim
    assert claim.spent_s == 0.0
    assert submit(stopped), "its next transaction has another connection"
    stopped.close()
    other.close()


def test_a_statement_times_out(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(of_postgres.OPTIONS, "statement_timeout", 1000)
    database = Database(postgres_url)
    with pytest.raises(OperationalError, match="statement timeout"), database.read() as db:
        db.execute(text("select pg_sleep(60)"))
    database.close()


def test_connections_that_the_server_closed_are_replaced(postgres: Postgres, postgres_url: str) -> None:
    """Those that nobody uses, and one in a transaction, of which nothing is written."""
    database = Database(postgres_url)
    job_id = submit(database)

    def end(*sessions: Connection) -> None:
        for pid in [db.execute(text("select pg_backend_pid()")).scalar_one() for db in sessions]:
            postgres.run(f"select pg_terminate_backend({pid}, 10000)")

    def write_and_die() -> None:
        with database.write() as db:
            db.execute(update(jobs).where(jobs.c.id == job_id).values(spent_s=99.0))
            end(db)
            db.execute(update(jobs).where(jobs.c.id == job_id).values(spent_s=99.0))

    with database.read() as first, database.read() as second:
        end(first, second)
    with database.read(), database.read():
        pass
    with pytest.raises(OperationalError):
        write_and_die()
    assert row(database, job_id).spent_s == 0.0
    submit(database)
    database.close()


def test_a_server_that_hangs_causes_an_error(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(postgres_url)
    with database.read() as db:
        pid = db.execute(text("select pg_backend_pid()")).scalar_one()
        monkeypatch.setattr(of_postgres, "ANSWER_S", 0.5)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(OperationalError, match="no answer within"):
                db.execute(text("select 1"))
        finally:
            os.kill(pid, signal.SIGCONT)
    monkeypatch.undo()
    submit(database)  # by another connection
    database.close()
