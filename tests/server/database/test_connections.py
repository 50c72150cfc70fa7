"""Connections to PostgreSQL that time out, are lost or are replaced, and statements that are sent together."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from sqlalchemy import Connection, select, text, update
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from support.service.postgres import Postgres
from support.service.work import row, submit

from optpipe_server.database import Database, Searches
from optpipe_server.database import postgres as of_postgres
from optpipe_server.database.tables import jobs


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
