"""Opening, migrating and refusing databases of both kinds, and timeouts of transactions."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection, create_engine, insert, inspect, select, text, update
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError, TimeoutError
from support.jobs import A, expire, row, submit
from support.postgres import Postgres

from optpipe.errors import InputError
from optpipe.options import SolveOptions
from optpipe_server.database import AwayError, Database, Jobs, Leases, reap
from optpipe_server.database import postgres as of_postgres
from optpipe_server.database.jobs import options_of
from optpipe_server.database.tables import adoptions, incumbents, jobs, metadata


def test_the_migrations_make_the_tables(database: Database) -> None:
    with database.read() as db:
        assert compare_metadata(MigrationContext.configure(db, opts={"compare_type": True}), metadata) == []
        assert {*inspect(db).get_table_names()} == {*metadata.tables, "alembic_version"}


def test_options_of_former_jobs_are_kept(sqlite_url: str, postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    with postgres.database() as postgres_url:
        for url in (sqlite_url, postgres_url):
            _migrate_former_jobs(url, monkeypatch)


def _migrate_former_jobs(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    upgrade = command.upgrade
    with monkeypatch.context() as former:
        former.setattr(command, "upgrade", lambda config, _: upgrade(config, "0001"))
        before = Database(url)
    times = {"version": 1, "problem_version": 1, "last_seq": 1, "attempt": 1, "spent_s": 0.0, "crashes": 0, "losses": 0}
    of_job = {"tenant": A, "state": "done", "problem_name": "", "problem_sha256": "0" * 64, "status": "feasible"}
    asked = {"method": "cpsat", "time_limit_s": 30.0, "gap_limit": 0.01, "priority": 0, "cancel_requested": False}
    of_seq = {"seq": 1, "problem_version": 1, "attempt": 1, "source": "solver", "method": "x", "found_at": "now"}
    for objective in ("makespan", "span"):
        job = {"id": objective, "objective": objective, "created_at": "now", **times, **of_job, **asked}
        incumbent = {"job": objective, "makespan_ms": 2.0, "span_ms": 1.0, "programs": "", **of_seq}
        for table, values in (("jobs", job), ("incumbents", incumbent)):
            names = ", ".join(values)
            with before.write() as db:
                db.execute(text(f"insert into {table} ({names}) values (:{names.replace(', ', ', :')})"), values)
    before.close()
    after = Database(url)
    for objective, value_ms in (("makespan", 2.0), ("span", 1.0)):
        options = SolveOptions(method="cpsat", objective=objective, time_limit_s=30.0, gap=0.01)
        assert options_of(row(after, objective)) == options
        with after.read() as db:
            found = db.execute(select(incumbents.c.value_ms).where(incumbents.c.job == objective))
            assert found.scalar_one() == value_ms
    after.close()


def test_a_reopened_database_keeps_its_content(database_url: str) -> None:
    first = Database(database_url)
    job_id = submit(first)
    before = row(first, job_id)
    first.close()
    again = Database(database_url)
    assert row(again, job_id) == before
    again.close()


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


def test_tables_of_a_newer_release_are_refused_and_unlocked(database_url: str) -> None:
    database = Database(database_url)
    with database.write() as db:
        revision = db.execute(text("select version_num from alembic_version")).scalar_one()
        db.execute(text("update alembic_version set version_num = '9999'"))
    database.close()
    with pytest.raises(InputError, match="revision '9999', which this release does not know"):
        Database(database_url)
    bare = create_engine(database_url.replace("postgresql:", "postgresql+psycopg:"))
    with bare.begin() as db:
        db.execute(text("update alembic_version set version_num = :revision"), {"revision": revision})
    bare.dispose()
    Database(database_url).close()  # nothing holds the file


OPEN = "import sys; from optpipe_server.database import Database; Database(sys.argv[1]).close(); print('opened')"


def test_processes_that_migrate_at_once(postgres: Postgres) -> None:
    with postgres.database() as url:
        started = [
            subprocess.Popen([sys.executable, "-c", OPEN, url], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for _ in range(2)
        ]
        assert [process.communicate()[0].decode() for process in started] == ["opened\n"] * 2
        database = Database(url)
        with database.read() as db:
            assert compare_metadata(MigrationContext.configure(db), metadata) == []
            assert len(db.execute(text("select * from alembic_version")).all()) == 1
        database.close()


def test_the_error_for_an_absent_database_names_it_without_password() -> None:
    with pytest.raises(
        AwayError, match=r"^database = 'postgresql://me:\*\*\*@127\.0\.0\.1:1/name': .*Connection refused$"
    ):
        Database("postgresql://me:secret@127.0.0.1:1/name")


def test_a_migration_may_take_its_time(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[str] = []

    def upgrade(config: Config, _revision: str) -> None:
        for name in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"):
            limits.append(config.attributes["connection"].execute(text(f"show {name}")).scalar_one())
        config.attributes["connection"].execute(text("select pg_sleep(4)"))

    monkeypatch.setattr(command, "upgrade", upgrade)
    monkeypatch.setattr(of_postgres, "ANSWER_S", 2.0)
    with postgres.database() as url:
        database = Database(url)
        with database.read() as db:
            assert db.execute(text("show statement_timeout")).scalar_one() == "10s"
            with pytest.raises(OperationalError, match="no answer"):
                db.execute(text("select pg_sleep(4)"))
        database.close()
    assert limits == ["0", "0", "0"]


def test_a_file_has_one_process(tmp_path: Path, sqlite_url: str) -> None:
    database = Database(sqlite_url)
    (tmp_path / "link").symlink_to(tmp_path / "service.sqlite")
    for url in (sqlite_url, f"sqlite:///{tmp_path / 'link'}"):
        with pytest.raises(InputError, match="another process has it; processes can share a PostgreSQL database"):
            Database(url)
    ended = subprocess.run([sys.executable, "-c", OPEN, sqlite_url], capture_output=True, text=True)
    assert "another process has it" in ended.stderr
    database.close()
    assert subprocess.run([sys.executable, "-c", OPEN, sqlite_url], capture_output=True, text=True).stdout == "opened\n"


def test_a_new_file_is_readable_by_its_user_only(tmp_path: Path, sqlite_url: str) -> None:
    Database(sqlite_url).close()
    assert {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {
        "service.sqlite": 0o600,
        "service.sqlite.lock": 0o600,
    }


def test_a_secondary_opens_the_file_of_another_process(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    beside = Database(sqlite_url, secondary=True)
    job_id = submit(beside)
    assert row(database, job_id).id == job_id
    beside.close()
    with pytest.raises(InputError, match="another process has it"):
        Database(sqlite_url)
    with database.write() as db:
        db.execute(text("delete from alembic_version"))
    with pytest.raises(InputError, match="of an older release uses it; end that first"):
        Database(sqlite_url, secondary=True)
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
    monkeypatch.setattr(of_postgres, "IDLE_MS", 3000)
    stopped, other = Database(postgres_url), Database(postgres_url)
    job_id = submit(other)
    Leases(stopped, "w").claim()
    expire(other, job_id)
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
    assert reap(other) == [], "its row is held"
    with other.write() as db:  # waits until the server has ended the other's transaction
        db.execute(select(jobs).where(jobs.c.id == job_id).with_for_update())
    assert reap(other) == [job_id]
    go_on.set()
    thread.join()
    assert len(failed) == 1, "and nothing of it was written"
    assert (row(other, job_id).state, row(other, job_id).spent_s) == ("queued", 0.0)
    assert submit(stopped), "its next transaction has another connection"
    stopped.close()
    other.close()


def test_a_statement_times_out(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_postgres, "STATEMENT_MS", 1000)
    database = Database(postgres_url)
    job_id = submit(database)
    with pytest.raises(OperationalError, match="statement timeout"), database.read() as db:
        db.execute(text("select pg_sleep(60)"))
    with database.write() as held:
        held.execute(select(jobs).where(jobs.c.id == job_id).with_for_update())
        with pytest.raises(OperationalError, match="timeout"):
            submit_changes(database, job_id)
    submit_changes(database, job_id)
    database.close()


def submit_changes(database: Database, job_id: str) -> None:
    with database.write() as db:
        db.execute(update(jobs).where(jobs.c.id == job_id).values(spent_s=1.0))


def test_waiting_for_a_connection_times_out(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_postgres, "CONNECTIONS", 2)
    monkeypatch.setattr(of_postgres, "CONNECT_S", 3)
    database = Database(postgres_url)
    with database.read(), database.read(), pytest.raises(TimeoutError):
        submit(database)
    submit(database)
    database.close()


def end_connection_of(db: Connection, postgres: Postgres) -> None:
    pid = db.execute(text("select pg_backend_pid()")).scalar_one()
    postgres.run(f"select pg_terminate_backend({pid}, 10000)")


def test_a_connection_lost_in_a_transaction_is_replaced(postgres: Postgres, postgres_url: str) -> None:
    database = Database(postgres_url)
    job_id = submit(database)

    def die() -> None:
        with database.write() as db:
            db.execute(update(jobs).where(jobs.c.id == job_id).values(spent_s=99.0))
            end_connection_of(db, postgres)

    with pytest.raises(OperationalError):
        die()
    assert row(database, job_id).spent_s == 0.0
    submit(database)
    database.close()


def test_connections_that_the_server_closed_are_replaced(postgres: Postgres, postgres_url: str) -> None:
    database = Database(postgres_url)
    with database.read() as first, database.read() as second, database.read() as third:
        pids = [db.execute(text("select pg_backend_pid()")).scalar_one() for db in (first, second, third)]
    for pid in pids:
        postgres.run(f"select pg_terminate_backend({pid}, 10000)")
    with database.read() as first, database.read() as second, database.write() as third:
        anew = [db.execute(text("select pg_backend_pid()")).scalar_one() for db in (first, second, third)]
    assert not {*pids} & {*anew}
    submit(database)
    database.close()


def test_pipelined_statements_are_atomic(database: Database) -> None:
    job_id = submit(database)

    def write(*numbers: int) -> None:
        with database.write() as db, database.pipelined(db):
            for number in numbers:
                db.execute(insert(adoptions), {"job": job_id, "seq": 60 // number, "step": number, "adopted_at": "now"})

    write(1, 2)
    with pytest.raises(IntegrityError):
        write(3, 2, 4)
    with pytest.raises(ZeroDivisionError):
        write(5, 0)
    with database.read() as db:
        assert db.execute(select(adoptions.c.step).order_by(adoptions.c.step)).scalars().all() == [1, 2]
    write(6)


def test_a_connection_lost_in_a_pipeline_is_replaced(postgres: Postgres, postgres_url: str) -> None:
    database = Database(postgres_url)
    job_id = submit(database)

    def die() -> None:
        with database.write() as db:
            end_connection_of(db, postgres)
            with database.pipelined(db):
                db.execute(update(jobs).where(jobs.c.id == job_id).values(spent_s=99.0))
                db.execute(update(jobs).where(jobs.c.id == job_id).values(spent_s=99.0))

    with pytest.raises(OperationalError):
        die()
    assert row(database, job_id).spent_s == 0.0
    submit(database)
    database.close()


def test_a_submission_and_its_display_take_few_round_trips(postgres_url: str, tmp_path: Path) -> None:
    database = Database(postgres_url)
    job_id = submit(database)

    def trips_of(question: Callable[[], object]) -> int:
        """Count the round trips to the server, by libpq's own trace."""
        with (tmp_path / "trace").open("w+") as trace:
            with database.read() as db:  # by the one connection that there is
                line: Any = db.connection.driver_connection
            line.pgconn.trace(trace.fileno())
            question()
            line.pgconn.untrace()
            trace.seek(0)
            words = re.findall(r"^\S+ \S+\t([FB])\t", trace.read(), re.MULTILINE)
        return sum(before + after == "FB" for before, after in pairwise(words))

    assert trips_of(lambda: Jobs(database).job_with_last_incumbent(A, job_id)) == 1
    assert trips_of(lambda: submit(database)) == 5, (
        "its beginning, its turn, the queue's length, all that is written, its end"
    )
    database.close()


def test_a_failed_pipeline_leaks_no_connection(postgres: Postgres, postgres_url: str) -> None:
    database = Database(postgres_url)
    job_id = submit(database)
    everybody, go_on = threading.Barrier(5), threading.Event()

    def hold() -> None:
        with database.write() as db:
            db.execute(select(jobs))
            everybody.wait(60)
            go_on.wait(60)

    def die() -> None:
        with database.write() as db:
            end_connection_of(db, postgres)
            with database.pipelined(db):
                db.execute(update(jobs).where(jobs.c.id == job_id).values(spent_s=99.0))

    others = [threading.Thread(target=hold) for _ in range(4)]
    for other in others:
        other.start()
    everybody.wait(60)
    with pytest.raises(OperationalError):
        die()
    go_on.set()
    for other in others:
        other.join()
    submit(database)
    sessions = text(
        "select count(*) from pg_stat_activity where datname = current_database() and application_name = 'optpipe'"
    )
    with database.read() as db:
        assert db.execute(sessions).scalar_one() <= 5
    database.close()
    last = Database(postgres_url)
    with last.read() as db:
        assert db.execute(sessions).scalar_one() == 1, "its own"
    last.close()


def test_a_server_that_hangs_causes_an_error(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(postgres_url)
    with database.read() as db:
        pid = db.execute(text("select pg_backend_pid()")).scalar_one()
    monkeypatch.setattr(of_postgres, "ANSWER_S", 0.5)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(OperationalError, match="no answer within"):
            submit(database)
        monkeypatch.undo()
        job_id = submit(database)  # by another connection
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [job.id for job in Jobs(database).page(A, None, None, 10)] == [job_id]
    database.close()


def test_a_connection_in_use_is_closed_once_its_database_is_closed(database_url: str) -> None:
    database = Database(database_url)
    with database.read() as db:
        connection: Any = db.connection.driver_connection
        database.close()
        assert db.execute(text("select 1")).scalar_one() == 1
    with pytest.raises((sqlite3.ProgrammingError, psycopg.OperationalError), match="closed"):
        connection.execute("select 1")


def test_abort_connections_ends_a_wait_for_an_answer(postgres_url: str) -> None:
    database, failed = Database(postgres_url), threading.Event()

    def wait() -> None:
        with pytest.raises(OperationalError), database.read() as db:
            db.execute(text("select pg_sleep(9)"))
        failed.set()

    thread = threading.Thread(target=wait)
    thread.start()
    while not failed.wait(0.05):
        database.abort_connections()
    thread.join()
    submit(database)
    database.close()
