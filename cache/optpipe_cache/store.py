"""`Cache`: a SQLite file of solved schedules, one per problem and objective, that any number of processes may share."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from optpipe.child import Objective, Programs
from optpipe.errors import InputError, ScheduleError, input_error
from optpipe.files import Found
from optpipe.problem import Problem, Record, TotalMs
from optpipe.schedule import Schedule
from optpipe.validity import check
from optpipe_cache.features import Features, distance, features, shape

VERSION = 1  # of the tables, kept in the file's user_version
BUSY_S = 10.0  # how long to wait for another process that writes
MOST_KEPT = 2**63 - 1  # the largest LIMIT
MOST_TRIED = 16  # candidates that are checked before a lookup gives up

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


class Entry(Record):
    """A solved schedule as it is kept and exported: one JSON line, format `optpipe.cache/1`."""

    format: Literal["optpipe.cache/1"] = "optpipe.cache/1"
    problem: Problem
    objective: Objective
    objective_ms: TotalMs
    status: Found
    lower_bound_ms: TotalMs | None = None
    method: str
    programs: Programs

    def schedule(self, problem: Problem | None = None) -> Schedule:
        """Its programs, for another problem where one is given; raises `InputError` for an op that cannot be read."""
        return self.programs.schedule(problem or self.problem, self.method)

    def beats(self, other: Entry) -> bool:
        """Shorter, or as short with a better bound."""
        return (self.objective_ms, -(self.lower_bound_ms or 0.0)) < (other.objective_ms, -(other.lower_bound_ms or 0.0))


@dataclass(frozen=True)
class Hit:
    """A schedule found for a problem: checked and simulated on exactly that problem, whichever it was solved for."""

    schedule: Schedule
    distance: float  # see `optpipe_cache.distance`; 0 where `exact`
    exact: bool  # solved for this very problem
    status: Found  # `optimal` only where exact
    lower_bound_ms: float | None  # only where exact
    entry: Entry  # what it was solved for


def default_path() -> Path:
    """`$OPTPIPE_CACHE`, else `optpipe/schedules.sqlite` in the user's cache folder."""
    if path := os.environ.get("OPTPIPE_CACHE"):
        return Path(path)
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise InputError("the cache's place is not known: this user has no home folder, and OPTPIPE_CACHE is not set") from None
    return folder / "optpipe" / "schedules.sqlite"


class Cache:
    """Solved schedules in one file. Every method opens the file for itself, so threads and processes may share a path.

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
                raise InputError(f"{self.path}: its tables have version {version}; this release knows version {VERSION}")
            if version == 0:
                db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)) as db:
                yield db
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise InputError(f"{self.path}: the cache cannot be used: {error}") from None

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        """A transaction that no other writer can come between; what is raised in it closes the file, which undoes it."""
        with self._open() as db:
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")

    def add(self, schedule: Schedule, status: Found, lower_bound_ms: float | None = None, objective: Objective = "makespan") -> bool:
        """Keeps the schedule unless a better one for its problem is there; tells whether it did.

        Raises `ScheduleError` for a schedule that `check` refuses, `InputError` for a bound above its own length, or for `optimal` without
        the bound that proves it: who finds such an entry would never search again.
        """
        if wrong := check(schedule.problem, schedule):
            raise ScheduleError(f"the schedule is not valid and was not added: {wrong[0]}")
        value = schedule.makespan_ms if objective == "makespan" else schedule.span_ms
        if lower_bound_ms is not None and lower_bound_ms > value * (1 + 1e-9) + 1e-9:
            raise InputError(f"lower_bound_ms = {lower_bound_ms}: the schedule has a {objective} of {value} ms, a bound is not above it")
        if status == "optimal" and (lower_bound_ms is None or value > lower_bound_ms * (1 + 1e-9) + 1e-9):
            raise InputError(f"status = 'optimal': lower_bound_ms = {lower_bound_ms} does not prove it, the {objective} is {value} ms")
        try:
            entry = Entry(
                problem=schedule.problem,
                objective=objective,
                objective_ms=value,
                status=status,
                lower_bound_ms=lower_bound_ms,
                method=schedule.method,
                programs=Programs.of(replace(schedule, placement=None)),  # of `problem` as it is
            )
        except ValidationError as error:
            raise input_error(error, "cache") from None
        return self._keep(entry)

    def _keep(self, entry: Entry) -> bool:
        problem = entry.problem
        row = (problem.sha256, entry.objective, shape(problem), json.dumps(features(problem)), datetime.now(UTC).isoformat())
        with self._write() as db:
            known = _entry(db, problem.sha256, entry.objective)
            if known and not entry.beats(known) and _fitting(known, problem):
                return False
            db.execute("INSERT OR REPLACE INTO schedules VALUES (?, ?, ?, ?, ?, ?)", (*row, entry.model_dump_json(exclude_none=True)))
        return True

    def lookup(self, problem: Problem, objective: Objective = "makespan") -> Hit | None:
        """The schedule of this very problem, else the one of the nearest problem of the same shape that passes `check` on this one."""
        with self._open() as db:
            entry = _entry(db, problem.sha256, objective)
            if entry and (schedule := _fitting(entry, problem)):
                return Hit(schedule, 0.0, True, entry.status, entry.lower_bound_ms, entry)
            others = db.execute(
                "SELECT problem_sha256, features FROM schedules WHERE shape = ? AND objective = ? AND problem_sha256 != ?",
                (shape(problem), objective, problem.sha256),
            ).fetchall()
            wanted = features(problem)
            nearest = sorted((far, sha256) for sha256, text in others if (far := _distance(wanted, text)) is not None)
            for far, sha256 in nearest[:MOST_TRIED]:
                entry = _entry(db, sha256, objective)
                if entry and (schedule := _fitting(entry, problem)):
                    return Hit(schedule, far, False, "feasible", None, entry)
        return None

    def entries(self) -> list[Entry]:
        """All that is kept, newest first."""
        with self._open() as db:
            rows = db.execute("SELECT entry FROM schedules ORDER BY added DESC, problem_sha256").fetchall()
        return [entry for (text,) in rows if (entry := _read(text))]

    def export_lines(self) -> Iterator[str]:
        """Every entry as a line of JSON, for `import_lines` of another cache."""
        return (entry.model_dump_json(exclude_none=True) for entry in self.entries())

    def import_lines(self, lines: Iterable[str | bytes]) -> int:
        """Adds exported entries, each checked again and kept only where it is better; returns how many were.

        Raises `InputError` or `ScheduleError` naming the line.
        """
        added = 0
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = Entry.model_validate_json(line)
                added += self.add(entry.schedule(), entry.status, entry.lower_bound_ms, entry.objective)
            except ValidationError as error:
                raise input_error(error, f"line {number}") from None
            except (InputError, ScheduleError) as error:
                raise type(error)(f"line {number}: {error}") from None
        return added

    def prune(self, keep: int) -> int:
        """Forgets all but the `keep` newest entries; returns how many."""
        if keep < 0:
            raise InputError(f"keep = {keep}: must not be negative")
        newest = "SELECT rowid FROM schedules ORDER BY added DESC, problem_sha256 LIMIT ?"
        with self._write() as db:
            return db.execute(f"DELETE FROM schedules WHERE rowid NOT IN ({newest})", (min(keep, MOST_KEPT),)).rowcount


def _entry(db: sqlite3.Connection, problem_sha256: str, objective: Objective) -> Entry | None:
    row = db.execute("SELECT entry FROM schedules WHERE problem_sha256 = ? AND objective = ?", (problem_sha256, objective)).fetchone()
    return _read(row[0]) if row else None


def _read(text: str) -> Entry | None:
    """An entry of the file; None where an older release or a damaged file left something that is none."""
    try:
        return Entry.model_validate_json(text)
    except ValidationError:
        return None


def _distance(wanted: Features, text: str) -> float | None:
    """The distance to an entry's features; None where they are damaged."""
    try:
        return distance(wanted, json.loads(text))
    except (ValueError, KeyError, TypeError):
        return None


def _fitting(entry: Entry, problem: Problem) -> Schedule | None:
    try:
        schedule = entry.schedule(problem)
    except InputError:
        return None
    return None if check(problem, schedule) else schedule
