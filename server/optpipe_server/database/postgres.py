"""PostgreSQL: connections with an end to every wait for an answer, and Procrastinate's queue beside our tables.

Needs psycopg and Procrastinate, which are optional.
"""

from __future__ import annotations

import time
from typing import Any

import psycopg
from procrastinate import App, SyncPsycopgConnector
from procrastinate.exceptions import ConnectorException
from procrastinate.schema import SchemaManager
from sqlalchemy import URL, Connection, Engine, create_engine, event, text
from sqlalchemy.exc import OperationalError

CONNECT_S = 3
ANSWER_S = 12.0  # a server that has not even reported a timeout by then hangs
SILENT_S = 10  # a connection whose other side acknowledges nothing for so long is broken
CONNECTIONS = 20  # per process

OPTIONS: dict[str, object] = {
    "statement_timeout": 10_000,  # ms, waiting for locks included
    "lock_timeout": 10_000,
    # Between two statements of a transaction: a process that is stopped or cut off in one blocks its rows no longer.
    "idle_in_transaction_session_timeout": 5_000,
    "timezone": "UTC",
}

SOLVE = "solve"  # the name of the queue's task, whose argument is a job's id
FIRST = 1000  # above every job's priority

_FORGOTTEN = text(
    "select id from jobs where state in ('queued', 'running') and not exists "
    "(select from procrastinate_jobs where lock = jobs.id and status in ('todo', 'doing'))"
)
_app = App(connector=SyncPsycopgConnector())  # never opened: it uses our connections


class DeadlineConnection(psycopg.Connection[Any]):
    """A connection that gives up after `ANSWER_S`.

    The server ends statements that take too long. A server that hangs, as a whole or by its disk, does not, so the
    connection is closed here.
    """

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        until = time.monotonic() + ANSWER_S
        try:
            return super().wait(gen, interval, ANSWER_S if timeout is None else timeout)
        except psycopg.OperationalError:
            if time.monotonic() < until:
                raise
            self.pgconn.finish()
            raise psycopg.OperationalError(f"no answer within {ANSWER_S:g} s") from None


def arguments() -> dict[str, Any]:
    """Return what each connection is opened with, beside its URL."""
    return {
        "connect_timeout": CONNECT_S,
        "tcp_user_timeout": SILENT_S * 1000,
        "keepalives_idle": SILENT_S,
        "keepalives_interval": 2,
        "options": " ".join(f"-c {name}={value}" for name, value in OPTIONS.items()),
        "application_name": "optpipe",
    }


def connections(url: URL) -> Engine:
    """Return the pool of connections to this database; those that the server has closed are replaced."""
    engine = create_engine(
        url,
        pool_size=CONNECTIONS,
        max_overflow=0,
        pool_timeout=CONNECT_S,
        pool_pre_ping=True,
        use_native_hstore=False,  # looking for it would be one more query per connection
        connect_args=arguments(),
    )
    event.listen(
        engine, "do_connect", lambda _dialect, _record, args, named: DeadlineConnection.connect(*args, **named)
    )
    return engine


def create_queue(db: Connection) -> None:
    """Create Procrastinate's tables in this transaction unless they are there."""
    if db.execute(text("select to_regclass('procrastinate_jobs')")).scalar_one() is None:
        db.connection.cursor().execute(SchemaManager.get_schema())


def enqueue(db: Connection, job_id: str, priority: int) -> None:
    """Let a worker solve the job once this transaction is committed; one job is solved by one worker at a time."""
    connection = db.connection.driver_connection
    try:
        _app.configure_task(SOLVE, lock=job_id, priority=priority, connection=connection).defer(job_id=job_id)
    except ConnectorException as error:
        raise OperationalError(None, None, error.__cause__ or error) from error


def enqueue_forgotten(db: Connection) -> None:
    """Enqueue the open jobs that have no task, since their workers were lost; they come first.

    Each gets a new task: a worker that was taken for lost and goes on ends its own.
    """
    for job_id in db.execute(_FORGOTTEN).scalars().all():
        enqueue(db, job_id, FIRST)
