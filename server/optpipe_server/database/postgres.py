"""Connections to PostgreSQL: replaced when the server has closed them, and with an end to every wait for an answer."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from select import POLLIN, poll
from typing import Any

import psycopg
from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy import Connection as Transaction
from sqlalchemy.exc import DBAPIError, InvalidatePoolError
from sqlalchemy.pool import ConnectionPoolEntry

CONNECT_S = 3
STATEMENT_MS = 10_000  # the longest statement, waiting for locks included
ANSWER_S = 12.0  # a server that has not even reported a timeout by then hangs
# Longest time between two statements of a transaction: a process that is stopped or cut off in one blocks its rows no
# longer.
IDLE_MS = 5_000
SILENT_S = 10  # a connection whose other side acknowledges nothing for so long is broken
CONNECTIONS = 20  # per process


class DeadlineConnection(psycopg.Connection[Any]):
    """A connection that gives up after `ANSWER_S`.

    The server ends statements that take too long. A server that hangs, as a whole or by its disk, does not, so the
    connection is closed here.
    """

    has_deadline = True

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        if not self.has_deadline:
            return super().wait(gen, interval, timeout)
        until = time.monotonic() + ANSWER_S
        try:
            return super().wait(gen, interval, ANSWER_S if timeout is None else timeout)
        except psycopg.OperationalError:
            if time.monotonic() < until:
                raise
            self.pgconn.finish()
            raise psycopg.OperationalError(f"no answer within {ANSWER_S:g} s") from None

    def abort(self) -> None:
        """Break the connection from another thread, even while an answer is awaited."""
        with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(self.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)


def connections(url: URL) -> Engine:
    """Return the pool of connections to this database."""
    limits = {
        "statement_timeout": STATEMENT_MS,
        "lock_timeout": STATEMENT_MS,
        "idle_in_transaction_session_timeout": IDLE_MS,
    }
    arguments = {
        "connect_timeout": CONNECT_S,
        "tcp_user_timeout": SILENT_S * 1000,
        "keepalives_idle": SILENT_S,
        "keepalives_interval": 2,
        "options": " ".join(f"-c {name}={value}" for name, value in (limits | {"timezone": "UTC"}).items()),
        "application_name": "optpipe",
    }
    limited: dict[str, Any] = {"pool_size": CONNECTIONS, "max_overflow": 0, "pool_timeout": CONNECT_S}
    # Looking for hstore would be one more query per connection.
    engine = create_engine(url, **limited, use_native_hstore=False, connect_args=arguments)
    event.listen(
        engine, "do_connect", lambda _dialect, _record, given, named: DeadlineConnection.connect(*given, **named)
    )
    event.listen(engine, "checkout", _check)
    return engine


def _check(line: DeadlineConnection, record: ConnectionPoolEntry, _proxy: object) -> None:
    """Have the pool connect again if the server has closed this connection: there is something to read before any
    request.

    `pool_pre_ping` would tell it, too, at the price of one more round trip per transaction.
    """
    if record.info.get("used"):
        waiting = poll()
        if not line.closed:
            waiting.register(line.fileno(), POLLIN)
        if line.closed or waiting.poll(0):
            raise InvalidatePoolError
    record.info["used"] = True  # cleared when the pool connects again; new connections are not checked


@contextmanager
def without_deadline(db: Transaction) -> Iterator[None]:
    """Allow statements in the block to take any time, for example those of a migration."""
    line: Any = db.connection.driver_connection
    line.has_deadline = False
    try:
        yield
    finally:
        line.has_deadline = True


@contextmanager
def pipeline(db: Transaction, is_broken: Callable[[BaseException], bool]) -> Iterator[None]:
    """Send the statements of the block in one round trip; nothing may read their results. Raises SQLAlchemy's errors.

    Connections are not used again after an error that `is_broken` tells.
    """
    line: Any = db.connection.driver_connection
    try:
        with line.pipeline():
            yield
    except psycopg.Error as error:  # SQLAlchemy did not see it, because it waited for none of the statements
        if gone := line.closed or is_broken(error):
            line.close()
            with suppress(DBAPIError):
                # SQLAlchemy then sees that it is closed, and replaces the other connections of the pool, too.
                db.exec_driver_sql("select 1")
        raise DBAPIError.instance(
            None, None, error, psycopg.Error, connection_invalidated=gone, dialect=db.dialect
        ) from error
