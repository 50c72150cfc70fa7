"""`SqliteFile`: the file that a service has opened, connections to it, and whether it can still be trusted to keep what
is written."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from contextlib import suppress

from sqlalchemy import URL, Connection, Engine, ExceptionContext, create_engine, event
from sqlalchemy.exc import OperationalError

from optpipe.errors import InputError

BUSY_MS = 10_000  # how long a connection waits for another that writes
CONNECTIONS = 20  # per process
GONE = "its file or its log was removed or replaced; put it back, or end the service and start it with a whole file"


class UnusableError(OperationalError):
    """The database is damaged, or is not the one that was opened; `orig` has a sentence."""

    def __init__(self, why: str) -> None:
        super().__init__(None, None, sqlite3.OperationalError(why))


class SqliteFile:
    """A file and the log beside it (`-wal`), by device and inode, and the lock of the one process that writes.

    A process that has opened files writes to them also when they have other names or none; after a restart nobody finds
    what it wrote. The log stays the same as long as a connection is open, so this keeps one.

    Raises `InputError` if it cannot be opened, or another process has it and this one is not a `secondary`.
    """

    def __init__(self, file: str, secondary: bool) -> None:
        self._lock = _only_writer(file, secondary)
        self._path = os.path.realpath(file)
        self._opened = {self._path: _identity(self._path)}
        self._kept: sqlite3.Connection | None = None

    def connections(self, url: URL) -> Engine:
        """Return the pool of connections."""
        engine = create_engine(url, pool_size=CONNECTIONS, max_overflow=CONNECTIONS)
        event.listen(engine, "do_connect", lambda *_: self.require_same())  # else SQLite would make an empty file
        event.listen(engine, "connect", _configure)
        event.listen(engine, "begin", _begin)
        event.listen(engine, "handle_error", _raise_if_damaged)
        return engine

    def keep_log(self) -> None:
        """Open a connection that keeps the log, once there are tables."""
        try:
            self._kept = sqlite3.connect(self._path, check_same_thread=False)
            self._kept.execute("select count(*) from sqlite_master").close()
        except sqlite3.Error as error:
            raise UnusableError(str(error)) from None
        log = f"{self._path}-wal"
        self._opened[log] = _identity(log)

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def require_same(self) -> None:
        """Raise `UnusableError` if another file, or none, has the name by now."""
        if any(_identity(path) != opened for path, opened in self._opened.items()):
            raise UnusableError(GONE)


def _only_writer(file: str, secondary: bool) -> int | None:
    """Take the lock beside the file, which is released when the process ends, however it ends; None if another process
    has it and `secondary` allows that."""
    path, refused = os.path.realpath(file), f"database = 'sqlite:///{file}'"
    log = f"{path}-wal"
    if os.path.isfile(file) and (names := os.stat(file).st_nlink) > 1:  # SQLite would keep a log beside each name
        raise InputError(
            f"{refused}: the file has {names} names (hard links), so another process has it, or had it, by another "
            "one; keep one name"
        )
    if os.path.exists(log) and not os.path.exists(file):  # a new file would empty what a running service has written
        raise InputError(
            f"{refused}: the file is missing and its log {os.path.basename(log)} is there, so it was moved or removed "
            "while a process had it open; put it back, or remove the log to begin anew"
        )
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with suppress(FileExistsError):  # readable by this user only, as SQLite would not make it
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise InputError(f"{refused}: {error.strerror or error}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        if secondary:
            return None
        raise InputError(f"{refused}: another process has it; processes can share a PostgreSQL database") from None
    return lock


def _identity(path: str) -> tuple[int, int] | None:
    with suppress(OSError):
        status = os.stat(path)
        return status.st_dev, status.st_ino
    return None


def _configure(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # transactions begin in `_begin`
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", f"busy_timeout = {BUSY_MS}"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin(connection: Connection) -> None:
    """Take the write lock at once if the transaction will write: two of them could block each other halfway."""
    reads_only = connection.get_execution_options().get("reads_only", False)
    connection.exec_driver_sql("BEGIN" if reads_only else "BEGIN IMMEDIATE")


def _raise_if_damaged(context: ExceptionContext) -> None:
    """Raise `UnusableError` if SQLite found a page or the whole file damaged."""
    error = context.original_exception
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if isinstance(error, sqlite3.Error) and code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        raise UnusableError(f"it is damaged ({error}); put a whole copy in its place")
