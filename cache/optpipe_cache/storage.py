"""Where a cache keeps its schedules.

`Storage` is the interface that a cache needs; `FileStorage` is a SQLite file. The service has another one, rows of its
database.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Protocol

from optpipe.errors import InputError

VERSION = 1  # of the file's tables, stored in its user_version
BUSY_S = 10.0  # how long to wait for another process that writes

_SCHEMA = """
CREATE TABLE IF NOT EXISTS schedules (
    problem_sha256 TEXT NOT NULL,
    objective TEXT NOT NULL,
    shape TEXT NOT NULL,
    features TEXT NOT NULL,
    added TEXT NOT NULL,
    entry TEXT NOT NULL,
    PRIMARY KEY (problem_sha256, objective)
);
CREATE INDEX IF NOT EXISTS by_shape ON schedules (shape, objective);
"""


@dataclass(frozen=True)
class StoredRow:
    """An entry's text, and the columns by which it is found."""

    problem_sha256: str
    objective: str
    shape: str
    features: str  # JSON
    added: str  # ISO time in UTC
    entry: str  # JSON


class Storage(Protocol):
    """Rows of text, one per problem and objective, for any number of threads and processes.

    Only the cache knows what the texts mean.
    """

    def entry(self, problem_sha256: str, objective: str) -> str | None:
        """Return the entry of this problem."""

    def similar(self, shape: str, objective: str) -> Sequence[tuple[str, str]]:
        """Return (problem_sha256, features) of every entry of this structure (column `shape`)."""

    def entries(self) -> Sequence[str]:
        """Return all entries, newest first."""

    def swap(self, row: StoredRow, known: str | None) -> bool:
        """Store the row in place of the entry `known`, which `entry` returned; False if that is no longer there."""

    def prune(self, keep: int) -> int:
        """Delete all but the `keep` newest rows, 2^63 - 1 at most; return how many were deleted."""


class FileStorage:
    """A SQLite file. Every call opens it, so threads and processes can share a path.

    Raises `InputError` if the file cannot be opened or is not a cache.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror or error}") from None
        with self._open() as db:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, VERSION):
                raise InputError(
                    f"{self.path}: its tables have version {version}; this release knows version {VERSION}"
                )
            if version == 0:
                db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)) as db:
                yield db
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise InputError(f"{self.path}: the cache cannot be used: {error}") from None

    def entry(self, problem_sha256: str, objective: str) -> str | None:
        with self._open() as db:
            query = "SELECT entry FROM schedules WHERE problem_sha256 = ? AND objective = ?"
            row = db.execute(query, (problem_sha256, objective)).fetchone()
        return row[0] if row else None

    def similar(self, shape: str, objective: str) -> Sequence[tuple[str, str]]:
        with self._open() as db:
            return db.execute(
                "SELECT problem_sha256, features FROM schedules WHERE shape = ? AND objective = ?", (shape, objective)
            ).fetchall()

    def entries(self) -> Sequence[str]:
        with self._open() as db:
            return [text for (text,) in db.execute("SELECT entry FROM schedules ORDER BY added DESC, problem_sha256")]

    def swap(self, row: StoredRow, known: str | None) -> bool:
        with self._open() as db:
            if known is None:
                return (
                    db.execute("INSERT OR IGNORE INTO schedules VALUES (?, ?, ?, ?, ?, ?)", astuple(row)).rowcount == 1
                )
            values = "shape = ?, features = ?, added = ?, entry = ?"
            swapped = f"UPDATE schedules SET {values} WHERE problem_sha256 = ? AND objective = ? AND entry = ?"
            new = row.shape, row.features, row.added, row.entry
            return db.execute(swapped, (*new, row.problem_sha256, row.objective, known)).rowcount == 1

    def prune(self, keep: int) -> int:
        newest = "SELECT rowid FROM schedules ORDER BY added DESC, problem_sha256 LIMIT ?"
        with self._open() as db:
            return db.execute(f"DELETE FROM schedules WHERE rowid NOT IN ({newest})", (keep,)).rowcount
