"""`SqliteFile`: the file that a service has opened, and whether it can still be trusted to keep what is written."""

from __future__ import annotations

import os
import sqlite3
import stat
from contextlib import suppress

from sqlalchemy.exc import OperationalError

from optpipe.errors import InputError

LEAST_FREE_MIB = 4  # of the disk: SQLite's log may take so much before its pages are copied to the file
GONE = "its file or its log was removed or replaced; put it back, or end the service and start it with a whole file"

Identity = tuple[int, int] | None


class UnusableError(OperationalError):
    """The database is damaged, is not the one that was opened, or has no room; `orig` says so in a sentence."""

    def __init__(self, why: str) -> None:
        super().__init__(None, None, sqlite3.OperationalError(why))


class SqliteFile:
    """A file and the log beside it (`-wal`), by device and inode.

    A process that has opened files writes to them also when they have other names or none; after a restart nobody finds
    what it wrote. The log stays the same as long as a connection is open, so this keeps one.
    """

    def __init__(self, file: str) -> None:
        self._path = os.path.realpath(file)
        self._opened = {self._path: _identity(self._path)}
        self._kept: sqlite3.Connection | None = None

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

    def require_same(self) -> None:
        """Raise `UnusableError` if another file, or none, has the name by now."""
        if any(_identity(path) != opened for path, opened in self._opened.items()):
            raise UnusableError(GONE)

    def require_room(self) -> None:
        """Raise `UnusableError` if the disk is as good as full."""
        disk = os.statvfs(os.path.dirname(self._path))
        if (free_mib := disk.f_bavail * disk.f_frsize >> 20) < LEAST_FREE_MIB:
            raise UnusableError(f"its disk has {free_mib} MiB left; at least {LEAST_FREE_MIB} are needed")


def require_one_name(file: str) -> None:
    """Raise `InputError` for a file with hard links: SQLite would keep a log beside each name, and lose one of them."""
    with suppress(FileNotFoundError):
        there = os.stat(file)
        if stat.S_ISREG(there.st_mode) and (names := there.st_nlink) > 1:
            raise InputError(
                f"database = 'sqlite:///{file}': the file has {names} names (hard links), so another process has it, "
                "or had it, by another one; keep one name"
            )


def require_no_orphaned_log(file: str) -> None:
    """Raise `InputError` if a log lies there without its file: a new file of this name would empty what a running
    service has written."""
    log = f"{os.path.realpath(file)}-wal"
    if os.path.exists(log) and not os.path.exists(file):
        raise InputError(
            f"database = 'sqlite:///{file}': the file is missing and its log {os.path.basename(log)} is there, so it "
            "was moved or removed while a process had it open; put it back, or remove the log to begin anew"
        )


def is_damaged(error: BaseException) -> bool:
    """Return whether SQLite found a page or the whole file damaged."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return isinstance(error, sqlite3.Error) and code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _identity(path: str) -> Identity:
    with suppress(OSError):
        found = os.stat(path)
        return found.st_dev, found.st_ino
    return None
