"""`Database`: one URL, SQLite or PostgreSQL; transactions that end on the disk or not at all."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any
from weakref import WeakSet

from sqlalchemy import URL, Connection, Engine, ExceptionContext, create_engine, event, make_url, select
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import Float

from optpipe.errors import InputError

BUSY_MS = 10_000  # how long a connection to SQLite waits for another one that writes
CONNECTIONS = 20  # to SQLite, of one process
READ_ONLY = "25006"  # PostgreSQL's code for a transaction that may not write


class AwayError(InputError):
    """The database does not let us in now; it may later."""


class clock_s(FunctionElement[float]):  # noqa: N801 (an SQL function)
    """Seconds since 1970 by the database's clock, the same for all who share it, whatever their own clocks say."""

    type = Float()
    inherit_cache = True


@compiles(clock_s, "sqlite")
def _sqlite_clock(_element: clock_s, _compiler: Any, **_options: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(clock_s, "postgresql")
def _postgresql_clock(_element: clock_s, _compiler: Any, **_options: Any) -> str:
    return "extract(epoch from clock_timestamp())::float8"


def now() -> str:
    """The moment as text for people."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Database:
    """Connections to one database, from any thread. Its tables are brought up to date when it is opened.

    SQLite has one process that writes: the file's lock is held until `close`, and the process's threads take turns, so
    that none of them waits by polling. Raises `InputError` for a URL that cannot be used, and where another process has
    the SQLite file; `beside` it, for a command's few short writes, SQLite's own lock is enough, and the tables stay as
    that process made them. Raises `AwayError`, which is one, where it may be worth to try again.
    """

    def __init__(self, url: str, *, beside: bool = False) -> None:
        parsed = _parsed(url)
        self.sqlite = parsed.get_backend_name() == "sqlite"
        self._turn: Any = threading.Lock() if self.sqlite else nullcontext()
        self._lock_file = _only_writer(str(parsed.database), beside) if self.sqlite else None
        self._lock, self._lines = threading.Lock(), WeakSet[Any]()
        self.engine = _engine(parsed, self.sqlite)
        if not self.sqlite:
            event.listen(self.engine, "connect", self._made)
        self._reading = self.engine.execution_options(
            **({"reads_only": True} if self.sqlite else {"isolation_level": "AUTOCOMMIT"})
        )
        try:
            self._migrate()
        except BaseException as error:
            self.close()
            if isinstance(error, SQLAlchemyError):
                kind = AwayError if isinstance(error, OperationalError) else InputError
                raise kind(f"database = {_shown(parsed)!r}: {_first_line(error)}") from None
            raise

    def close(self) -> None:
        self.engine.dispose()
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def cut(self) -> None:
        """Whoever still waits for an answer of PostgreSQL gets an error instead: for a process that has to end."""
        with self._lock:
            for line in self._lines:
                line.cut()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Statements that only read; one transaction with SQLite, none with PostgreSQL, where each sees what is there
        by then anyway."""
        with self._reading.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that writes; once the block has been left without an error, what it wrote is on the disk."""
        with self._turn, self.engine.begin() as connection:
            yield connection

    @contextmanager
    def together(self, db: Connection) -> Iterator[None]:
        """Statements of a transaction whose results nobody reads go to PostgreSQL in one trip, and what they raise
        comes with the last."""
        if self.sqlite:
            yield
            return
        from optpipe_server.database.postgres import pipeline

        with pipeline(db, _of_no_use):
            yield

    def ping(self) -> None:
        """Raises SQLAlchemy's error where the database does not answer."""
        with self.read() as connection:
            connection.execute(select(1))

    def _made(self, line: Any, _record: object) -> None:
        with self._lock:
            self._lines.add(line)

    def _migrate(self) -> None:
        from optpipe_server.database.migrations import upgrade

        with self.write() as connection:
            if self.sqlite:
                upgrade(connection, only_check=self._lock_file is None)
                return
            from optpipe_server.database.postgres import no_hurry

            with no_hurry(connection):
                upgrade(connection)


def _parsed(url: str) -> URL:
    right = "sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME would be right"
    try:
        parsed = make_url(url)
    except (SQLAlchemyError, ValueError):
        raise InputError(f"database: not a URL; {right}") from None
    if "@" in (parsed.host or ""):  # what stands there is the end of a password
        raise InputError("database: more than one '@' before the host; in a password it is written %40")
    backend = parsed.get_backend_name()
    if backend not in ("sqlite", "postgresql") or not parsed.database or parsed.database == ":memory:":
        raise InputError(f"database = {_shown(parsed)!r}: {right}")
    if backend == "sqlite":
        if parsed.query or parsed.host:
            raise InputError(f"database = {_shown(parsed)!r}: sqlite:///FILE would be right")
        return parsed.set(drivername="sqlite")
    if find_spec("psycopg") is None:
        raise InputError("database: psycopg is not installed: pip install 'optpipe[postgres]'")
    return parsed.set(drivername="postgresql+psycopg")


def _shown(url: URL) -> str:
    """As whoever gave it would write it, without the password, wherever it stands."""
    return (
        url.set(drivername=url.get_backend_name())
        .difference_update_query(("password", "passfile", "sslpassword"))
        .render_as_string()
    )


def _only_writer(file: str, beside: bool) -> int | None:
    """Holds the lock beside the file, which ends with the process however it ends; None where another has it and that
    is no harm."""
    try:
        lock = os.open(f"{os.path.realpath(file)}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with suppress(FileExistsError):  # a new one is the user's alone, as SQLite would not make it
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise InputError(f"database = 'sqlite:///{file}': {error.strerror or error}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        if beside:
            return None
        raise InputError(
            f"database = 'sqlite:///{file}': another process has it; several processes can share a PostgreSQL database"
        ) from None
    return lock


def _engine(url: URL, sqlite: bool) -> Engine:
    if sqlite:
        engine = create_engine(url, pool_size=CONNECTIONS, max_overflow=CONNECTIONS)
        event.listen(engine, "connect", _configure)
        event.listen(engine, "begin", _begin)
        event.listen(engine, "handle_error", _judge)
        return engine
    from optpipe_server.database.postgres import connections  # which needs psycopg

    engine = connections(url)
    event.listen(engine, "handle_error", _judge)
    return engine


def _configure(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # SQLAlchemy's BEGIN is ours, see `_begin`
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", f"busy_timeout = {BUSY_MS}"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin(connection: Connection) -> None:
    """A transaction that will write takes the lock at once, so that two of them never meet halfway."""
    reads_only = connection.get_execution_options().get("reads_only", False)
    connection.exec_driver_sql("BEGIN" if reads_only else "BEGIN IMMEDIATE")


def _judge(context: ExceptionContext) -> None:
    if _of_no_use(context.original_exception):
        context.is_disconnect = True
        if context.execution_context is not None:
            # else the connection outlives its end until the cursor's last reference is gone
            context.execution_context.cursor.close()


def _of_no_use(error: BaseException) -> bool:
    """Whether the connection that met this is better not used again.

    SQLite would keep one read-only, or failing, when the disk is well. A PostgreSQL server that has become read-only
    may be the copy of another one by now, which the same URL names as well.
    """
    broken = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", 0) & 0xFF in broken
    return getattr(error, "sqlstate", None) == READ_ONLY


def _first_line(error: SQLAlchemyError) -> str:
    return str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
