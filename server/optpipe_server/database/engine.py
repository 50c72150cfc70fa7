"""`Database`: connections to SQLite or PostgreSQL, named by a URL, and transactions that are durable once they end."""

from __future__ import annotations

import secrets
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any

from sqlalchemy import URL, Connection, ExceptionContext, Row, Select, event, insert, make_url, select, text, update
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError, SQLAlchemyError, TimeoutError

from optpipe.errors import InputError
from optpipe_server.database.sqlite import SqliteFile
from optpipe_server.database.tables import metadata, probes

# The database is stopped, starting, full, read-only, or busy for too long.
DATABASE_AWAY = (OperationalError, InterfaceError, InternalError, TimeoutError)
PROBE_BYTES = 2**16  # written to see whether jobs can be stored
READ_ONLY = "25006"  # PostgreSQL's code for a transaction that may not write


class AwayError(InputError):
    """The database cannot be reached now; it may be later."""


def first_line(error: Exception) -> str:
    """Return the first line of the database's message."""
    return str(getattr(error, "orig", None) or error).strip().partition("\n")[0]


def now() -> str:
    """Return the current time as ISO text."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Database:
    """Connections to one database, usable from any thread. Its tables are created when it is first opened.

    A SQLite file belongs to one process that writes. Its lock is held until `close`, and threads write one at a time,
    so that none of them has to poll. As `secondary`, for a command's few short writes, the file is opened even if
    another process has it: SQLite's own lock is then enough.

    Raises `InputError` if the URL is wrong, or another process has the SQLite file, and `AwayError` if the database
    cannot be reached; a later attempt may succeed.
    """

    def __init__(self, url: str, *, secondary: bool = False) -> None:
        parsed = _parsed(url)
        self.sqlite = parsed.get_backend_name() == "sqlite"
        self._writing: Any = threading.Lock() if self.sqlite else nullcontext()
        self._file = SqliteFile(str(parsed.database), secondary) if self.sqlite else None
        if self._file is not None:
            self.engine = self._file.connections(parsed)
        else:
            from optpipe_server.database.postgres import connections  # needs psycopg, which is optional

            self.engine = connections(parsed)
        event.listen(self.engine, "handle_error", _invalidate_if_broken)
        self._reading = self.engine.execution_options(
            **({"reads_only": True} if self.sqlite else {"isolation_level": "AUTOCOMMIT"})
        )
        try:
            self._create()
        except BaseException as error:
            self.close()
            if isinstance(error, SQLAlchemyError):
                kind = AwayError if isinstance(error, OperationalError) else InputError
                raise kind(f"database = {_shown(parsed)!r}: {first_line(error)}") from None
            raise

    def close(self) -> None:
        """Close all connections that nobody uses, and let another process have the file."""
        self.engine.dispose()
        if self._file is not None:
            self._file.close()

    def read(self) -> AbstractContextManager[Connection]:
        """Return a connection for the statements of a `with` block, which only read.

        With SQLite they are one transaction; with PostgreSQL none, and each sees what was committed before it.
        """
        return self._reading.connect()

    def rows(self, query: Select[Any], **values: object) -> Sequence[Row[Any]]:
        """Return all rows of one query, with these values of its parameters."""
        with self.read() as connection:
            return connection.execute(query, values).all()

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Yield a connection in a transaction; once the block ends without an error, its writes are on the disk.

        Raises `UnusableError` if they would be in a file that nobody finds.
        """
        with self._writing, self.engine.begin() as connection:
            self.require_same_file()
            yield connection

    def require_same_file(self) -> None:
        """Raise `UnusableError` if the SQLite file that was opened has been removed or replaced."""
        if self._file is not None:
            self._file.require_same()

    def probe(self) -> None:
        """Write and read as much as a job has. Raises SQLAlchemy's error if that cannot be done."""
        written = secrets.token_hex(PROBE_BYTES // 2)
        with self.write() as connection:
            connection.execute(update(probes).values(text=written))
        with self.read() as connection:
            connection.execute(select(probes.c.text)).scalar_one()

    def _create(self) -> None:
        """Create the tables that are missing; one process at a time."""
        with self.write() as connection:
            if not self.sqlite:
                from optpipe_server.database.postgres import create_queue

                connection.execute(text("select pg_advisory_xact_lock(hashtextextended('optpipe: tables', 0))"))
                create_queue(connection)
            metadata.create_all(connection)
            if connection.execute(select(probes)).first() is None:
                connection.execute(insert(probes).values(number=1, text=""))
        if self._file is not None:
            self._file.keep_log()


def _parsed(url: str) -> URL:
    expected = "expected sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME"
    try:
        parsed = make_url(url)
    except (SQLAlchemyError, ValueError):
        raise InputError(f"database: not a URL; {expected}") from None
    if "@" in (parsed.host or ""):  # the end of a password
        raise InputError("database: more than one '@' before the host; write %40 for one in a password")
    backend = parsed.get_backend_name()
    if backend not in ("sqlite", "postgresql") or not parsed.database or parsed.database == ":memory:":
        raise InputError(f"database = {_shown(parsed)!r}: {expected}")
    if backend == "sqlite":
        if parsed.query or parsed.host:
            raise InputError(f"database = {_shown(parsed)!r}: expected sqlite:///FILE")
        return parsed.set(drivername="sqlite")
    if find_spec("procrastinate") is None:
        raise InputError("database: procrastinate is not installed: pip install 'optpipe[postgres]'")
    return parsed.set(drivername="postgresql+psycopg")


def _shown(url: URL) -> str:
    """The URL as the user would write it, without any password."""
    return (
        url.set(drivername=url.get_backend_name())
        .difference_update_query(("password", "passfile", "sslpassword"))
        .render_as_string()
    )


def _invalidate_if_broken(context: ExceptionContext) -> None:
    """Use a connection no more on which the disk failed, or whose server has become read-only.

    SQLite would keep one read-only, or failing, when the disk is well again. A PostgreSQL server that has become
    read-only may be the replica of another one by now, which the same URL names as well.
    """
    error = context.original_exception
    if isinstance(error, sqlite3.Error):
        failures = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
        broken = getattr(error, "sqlite_errorcode", 0) & 0xFF in failures
    else:
        broken = getattr(error, "sqlstate", None) == READ_ONLY
    if broken:
        context.is_disconnect = True
        if context.execution_context is not None:
            # Otherwise the connection stays open until the cursor's last reference is gone.
            context.execution_context.cursor.close()
