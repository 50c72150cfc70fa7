"""Connections to PostgreSQL that time out, are lost or are replaced, and statements that are sent together."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, insert, select, text, update
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError, TimeoutError
from support.jobs import A, expire, row, submit
from support.patience import GRACE_S
from support.postgres import Postgres

from optpipe_server.database import Database, Jobs, Leases, reap
from optpipe_server.database import postgres as of_postgres
from optpipe_server.database.tables import adoptions, jobs


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


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_connection_lost_in_a_transaction_is_replaced(postgres: Postgres, postgres_url: str, pipelined: bool) -> None:
    database = Database(postgres_url)
    job_id = submit(database)

    def die() -> None:
        with database.write() as db:
            db.execute(update(jobs).where(jobs.c.id == job_id).values(spent_s=99.0))
            end_connection_of(db, postgres)
            with database.pipelined(db) if pipelined else nullcontext():
                db.execute(update(jobs).where(jobs.c.id == job_id).values(spent_s=99.0))

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
    with database.read() as db:
        sessions_become(db, 5)
    database.close()
    last = Database(postgres_url)
    with last.read() as db:
        sessions_become(db, 1)  # its own
    last.close()


def sessions_become(db: Connection, most: int) -> None:
    """Wait until the server has no more sessions of ours: each ends a moment after its connection is closed."""
    sessions = text(
        "select count(*) from pg_stat_activity where datname = current_database() and application_name = 'optpipe'"
    )
    deadline = time.monotonic() + GRACE_S
    while (count := db.execute(sessions).scalar_one()) > most:
        assert time.monotonic() < deadline, f"{count} sessions instead of {most}"
        time.sleep(0.01)


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
