"""Where a cache keeps its schedules: rows that it reads and swaps, in a file or wherever else there is a `Storage`."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Protocol

from optpipe.errors import InputError

VERSION = 1  # of the file's tables, kept in its user_version
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
    """A row: an entry's text and what it is found by."""

    problem_sha256: str
    objective: str
    shape: str
    features: str  # JSON
    added: str  # ISO time in UTC
    entry: str  # JSON


class Storage(Protocol):
    """One row per problem and objective, for any number of threads and processes. Rows are texts: what they mean is the
    cache's."""

    def entry(self, problem_sha256: str, objective: str) -> str | None:
        """The entry of this problem."""

    def similar(self, shape: str, objective: str) -> Sequence[tuple[str, str]]:
        """Of every entry of this shape the problem and its features."""

    def entries(self) -> Sequence[str]:
        """All entries, newest first."""

    def swap(self, kept: StoredRow, known: str | None) -> bool:
        """Keeps the row in place of the entry `known`, which `entry` told; False where that is there no more."""

    def prune(self, keep: int) -> int:
        """Forgets all but the `keep` newest rows, 2^63 - 1 at most; returns how many."""


class FileStorage:
    """A SQLite file. Every method opens it for itself, so threads and processes may share a path.

    Raises `InputError` where the file cannot be opened or is no cache.
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

    def swap(self, kept: StoredRow, known: str | None) -> bool:
        with self._open() as db:
            if known is None:
                return (
                    db.execute("INSERT OR IGNORE INTO schedules VALUES (?, ?, ?, ?, ?, ?)", astuple(kept)).rowcount == 1
                )
            values = "shape = ?, features = ?, added = ?, entry = ?"
            swapped = f"UPDATE schedules SET {values} WHERE problem_sha256 = ? AND objective = ? AND entry = ?"
            new = kept.shape, kept.features, kept.added, kept.entry
            return db.execute(swapped, (*new, kept.problem_sha256, kept.objective, known)).rowcount == 1

    def prune(self, keep: int) -> int:
        newest = "SELECT rowid FROM schedules ORDER BY added DESC, problem_sha256 LIMIT ?"
        with self._open() as db:
            return db.execute(f"DELETE FROM schedules WHERE rowid NOT IN ({newest})", (keep,)).rowcount
