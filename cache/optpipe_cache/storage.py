"""Where a cache finds and keeps its schedules.

`Storage` is the interface that a cache needs; `FileStorage` is a SQLite file. The service has another one, rows of its
database. `Retention` limits what is kept, there and among a service's jobs that are over. A `Pack` is only read.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Protocol

from optpipe.errors import InputError

log = logging.getLogger("optpipe.cache")

PACK_PATH = Path(__file__).with_name("pack.zip")  # the release's
VERSION = 3  # of the file's tables, stored in its user_version
BUSY_S = 10.0  # how long to wait for another process that writes

MOST_KEPT = 2**63 - 1  # the largest LIMIT of SQL

_SCHEMA = """
CREATE TABLE IF NOT EXISTS schedules (
    problem_sha256 TEXT NOT NULL,
    objective TEXT NOT NULL,
    structure TEXT NOT NULL,
    features BLOB NOT NULL,
    used TEXT NOT NULL,
    hits INTEGER NOT NULL,
    entry TEXT NOT NULL,
    PRIMARY KEY (problem_sha256, objective)
);
CREATE INDEX IF NOT EXISTS by_structure ON schedules (structure, objective, used);
CREATE INDEX IF NOT EXISTS by_use ON schedules (used);
"""


@dataclass(frozen=True)
class StoredRow:
    """An entry's text, and the columns by which it is found."""

    problem_sha256: str
    objective: str
    structure: str
    features: bytes
    used: str  # when it was stored or found last: ISO time in UTC
    hits: int  # how often it was found
    entry: str  # JSON


@dataclass(frozen=True)
class Retention:
    """What was used last is kept; of jobs, what ended last. Raises `InputError` for a negative number."""

    keep: int | None = None  # how many; None is no limit
    days: float | None = None  # how long after that; None is no limit

    def __post_init__(self) -> None:
        for name, value in (("keep", self.keep), ("days", self.days)):
            if value is not None and not value >= 0:
                raise InputError(f"{name} = {value}: must not be negative")

    @property
    def limited(self) -> bool:
        return self.keep is not None or self.days is not None

    @property
    def most(self) -> int:
        """How many are kept at most."""
        return min(MOST_KEPT if self.keep is None else self.keep, MOST_KEPT)

    @property
    def since(self) -> str:
        """The time, ISO in UTC, before which nothing is kept; the empty text is before all."""
        if self.days is None:
            return ""
        try:
            return (datetime.now(UTC) - timedelta(days=self.days)).isoformat()
        except OverflowError:  # before the calendar begins
            return ""


KEEP_ALL = Retention()


class Source(Protocol):
    """Where entries are found: one per problem and objective. Only the cache knows what the texts mean."""

    def entry(self, problem_sha256: str, objective: str) -> str | None:
        """Return the entry of this problem."""

    def similar(self, structure: str, objective: str, most: int) -> Sequence[tuple[str, bytes]]:
        """Return (problem_sha256, features) of the entries of this structure, of the `most` used last if there are
        more."""


class Storage(Source, Protocol):
    """Rows that are also written, by any number of threads and processes."""

    def entries(self) -> Sequence[tuple[str, int]]:
        """Return (entry, hits) of all rows, those used last first."""

    def swap(self, row: StoredRow, stored: str | None) -> bool:
        """Store the row in place of the entry `stored`, which `entry` returned; False if that is no longer there."""

    def found(self, problem_sha256: str, objective: str, used: str) -> None:
        """Count a hit, and store when it was; do nothing where that cannot be written."""

    def prune(self, kept: Retention) -> int:
        """Delete the rows that are not kept; return how many were deleted."""


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
                    f"{self.path}: its tables have version {version}; this release knows version {VERSION}: delete it, "
                    "or name another file"
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

    def similar(self, structure: str, objective: str, most: int) -> Sequence[tuple[str, bytes]]:
        query = (
            "SELECT problem_sha256, features FROM schedules WHERE structure = ? AND objective = ? "
            "ORDER BY used DESC LIMIT ?"
        )
        with self._open() as db:
            return db.execute(query, (structure, objective, most)).fetchall()

    def entries(self) -> Sequence[tuple[str, int]]:
        with self._open() as db:
            return db.execute("SELECT entry, hits FROM schedules ORDER BY used DESC, problem_sha256").fetchall()

    def swap(self, row: StoredRow, stored: str | None) -> bool:
        columns = asdict(row)
        with self._open() as db:
            if stored is None:
                marks = ", ".join(f":{name}" for name in columns)
                done = db.execute(f"INSERT OR IGNORE INTO schedules ({', '.join(columns)}) VALUES ({marks})", columns)
            else:
                new = ", ".join(f"{name} = :{name}" for name in columns if name != "hits")
                same = "problem_sha256 = :problem_sha256 AND objective = :objective AND entry = :stored"
                done = db.execute(f"UPDATE schedules SET {new} WHERE {same}", columns | {"stored": stored})
            return done.rowcount == 1

    def found(self, problem_sha256: str, objective: str, used: str) -> None:
        counted = "UPDATE schedules SET hits = hits + 1, used = ? WHERE problem_sha256 = ? AND objective = ?"
        with suppress(InputError), self._open() as db:  # an answer that was read is an answer
            db.execute(counted, (used, problem_sha256, objective))

    def prune(self, kept: Retention) -> int:
        others = "SELECT rowid FROM schedules ORDER BY used DESC, problem_sha256 LIMIT -1 OFFSET ?"
        old = f"DELETE FROM schedules WHERE rowid IN ({others}) OR used < ?"
        with self._open() as db:
            return db.execute(old, (kept.most, kept.since)).rowcount


class Pack:
    """Solved schedules of common problems, in one file that a release carries: only read, for all threads.

    A zip file has one member for each structure and objective, compressed by itself. Its lines are rows as JSON: hash
    and features of a problem, then the entry as it is exported. A member is read when its structure is first asked
    for. A damaged file is reported and has no entries. `make pack` writes the release's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()
        # What was read, by member and by hash of the problem: features and entry.
        self._members: dict[str, dict[str, tuple[bytes, str]]] = {}

    def entry(self, problem_sha256: str, objective: str) -> str | None:
        """Return an entry that `similar` has found."""
        with self._lock:
            members = [rows for name, rows in self._members.items() if name.endswith(f"/{objective}")]
        return next((rows[problem_sha256][1] for rows in members if problem_sha256 in rows), None)

    def similar(self, structure: str, objective: str, most: int) -> Sequence[tuple[str, bytes]]:
        name = f"{structure}/{objective}"
        with self._lock:
            if name not in self._members:
                self._members[name] = self._read(name)
            rows = self._members[name]
        return [(sha256, packed) for sha256, (packed, _) in islice(rows.items(), most)]

    def _read(self, name: str) -> dict[str, tuple[bytes, str]]:
        try:
            with zipfile.ZipFile(self.path) as pack:
                lines = pack.read(name).decode().splitlines() if name in pack.namelist() else []
            rows = map(json.loads, lines)
            return {sha256: (bytes.fromhex(packed), entry) for sha256, packed, entry in rows}
        except Exception as error:  # a damaged file, or a Python that cannot unpack it, ends no lookup
            log.warning("%s: the pack cannot be read: %s", self.path, error)
            return {}


@cache
def release_pack() -> Pack:
    """The release's pack. Nothing is read yet."""
    return Pack(PACK_PATH)
