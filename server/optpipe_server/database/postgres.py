"""Connections to PostgreSQL: replaced when the server has closed them, and with an end to every wait for an answer."""

from __future__ import annotations

import time
from typing import Any

import psycopg
from sqlalchemy import URL, Engine, create_engine, event

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
    """Return the pool of connections to this database."""
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
        engine, "do_connect", lambda _dialect, _record, given, named: DeadlineConnection.connect(*given, **named)
    )
    return engine
