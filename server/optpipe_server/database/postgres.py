"""PostgreSQL: connections that are made anew where the server has ended them, and that wait for no answer for ever."""

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
ANSWER_S = 12.0  # a server that has not even said by then that it took too long hangs
# between two statements of a transaction: whoever is stopped in one, or cut off, keeps no row from others for longer
IDLE_MS = 5_000
SILENT_S = 10  # a connection whose other side does not even acknowledge for so long is broken
CONNECTIONS = 20  # of one process


class Line(psycopg.Connection[Any]):
    """A connection. The server ends what takes too long; one that hangs, as a whole or by its disk, does not, and so
    the line is closed."""

    hurries = True

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        if not self.hurries:
            return super().wait(gen, interval, timeout)
        until = time.monotonic() + ANSWER_S
        try:
            return super().wait(gen, interval, ANSWER_S if timeout is None else timeout)
        except psycopg.OperationalError:
            if time.monotonic() < until:
                raise
            self.pgconn.finish()
            raise psycopg.OperationalError(f"no answer within {ANSWER_S:g} s") from None

    def cut(self) -> None:
        """Ends it from another thread, whoever waits for an answer."""
        with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(self.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)


def connections(url: URL) -> Engine:
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
    engine = create_engine(
        url, **limited, use_native_hstore=False, connect_args=arguments
    )  # hstore: a question for each new connection
    event.listen(engine, "do_connect", lambda _dialect, _record, given, named: Line.connect(*given, **named))
    event.listen(engine, "checkout", _check)
    return engine


def _check(line: Line, record: ConnectionPoolEntry, _proxy: object) -> None:
    """Has the pool connect anew where the server has ended its connections: then there is something to read though
    nothing was asked.

    A question (`pool_pre_ping`) would tell it, too, at the price of one more trip to the server for every transaction.
    """
    if record.info.get("used"):
        waiting = poll()
        if not line.closed:
            waiting.register(line.fileno(), POLLIN)
        if line.closed or waiting.poll(0):
            raise InvalidatePoolError
    record.info["used"] = True  # until the pool connects anew: one that has just been made is not looked at


@contextmanager
def no_hurry(db: Transaction) -> Iterator[None]:
    """Statements that may take their time, such as those of a migration."""
    line: Any = db.connection.driver_connection
    line.hurries = False
    try:
        yield
    finally:
        line.hurries = True


@contextmanager
def pipeline(db: Transaction, of_no_use: Callable[[BaseException], bool]) -> Iterator[None]:
    """Statements whose results nobody reads go in one trip. Raises SQLAlchemy's errors; connections are not used again
    after one that is `of_no_use`."""
    line: Any = db.connection.driver_connection
    try:
        with line.pipeline():
            yield
    except psycopg.Error as error:  # of no statement that SQLAlchemy waited for
        if gone := line.closed or of_no_use(error):
            line.close()
            with suppress(DBAPIError):
                db.exec_driver_sql(
                    "select 1"
                )  # so SQLAlchemy sees that it is, and has the others of the pool made anew, too
        raise DBAPIError.instance(
            None, None, error, psycopg.Error, connection_invalidated=gone, dialect=db.dialect
        ) from error
