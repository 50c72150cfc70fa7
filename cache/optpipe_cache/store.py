"""`Cache`: solved schedules, one per problem and objective: which is kept, which is found."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from optpipe.errors import InputError, ScheduleError, input_error
from optpipe.evaluate.objective import Objective
from optpipe.model.problem import Problem
from optpipe.model.records import Record, TotalMs
from optpipe.process.protocol import Programs
from optpipe.schedule import Found, Schedule, check
from optpipe_cache.features import Features, distance, features, shape
from optpipe_cache.shelf import FileShelf, Kept, Shelf

MOST_KEPT = 2**63 - 1  # the largest LIMIT of SQL
MOST_TRIED = 16  # candidates that are checked before a lookup gives up


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
        raise InputError(
            "the cache's place is not known: this user has no home folder, and OPTPIPE_CACHE is not set"
        ) from None
    return folder / "optpipe" / "schedules.sqlite"


class Cache:
    """Solved schedules on a shelf; a path is that of a file, which threads and processes may share.

    Raises what its shelf raises: `InputError` where a file cannot be opened or is no cache.
    """

    def __init__(self, shelf: Shelf | str | Path) -> None:
        self._shelf: Shelf = FileShelf(shelf) if isinstance(shelf, str | Path) else shelf

    def add(
        self, schedule: Schedule, status: Found, lower_bound_ms: float | None = None, objective: Objective = "makespan"
    ) -> bool:
        """Keeps the schedule unless a better one for its problem is there; tells whether it did.

        Raises `ScheduleError` for a schedule that `check` refuses, `InputError` for a bound above its own length, or
        for `optimal` without the bound that proves it: who finds such an entry would never search again.
        """
        if wrong := check(schedule.problem, schedule):
            raise ScheduleError(f"the schedule is not valid and was not added: {wrong[0]}")
        value = schedule.makespan_ms if objective == "makespan" else schedule.span_ms
        if lower_bound_ms is not None and lower_bound_ms > value * (1 + 1e-9) + 1e-9:
            raise InputError(
                f"lower_bound_ms = {lower_bound_ms}: the schedule has a {objective} of {value} ms, a bound is not "
                "above it"
            )
        if status == "optimal" and (lower_bound_ms is None or value > lower_bound_ms * (1 + 1e-9) + 1e-9):
            raise InputError(
                f"status = 'optimal': lower_bound_ms = {lower_bound_ms} does not prove it, the {objective} is "
                f"{value} ms"
            )
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
        problem, text = entry.problem, entry.model_dump_json(exclude_none=True)
        found_by = problem.sha256, entry.objective, shape(problem), json.dumps(features(problem))
        while True:  # until nobody has come in between
            there = self._shelf.entry(problem.sha256, entry.objective)
            known = _read(there)
            if known and not entry.beats(known) and _fitting(known, problem):
                return False
            if self._shelf.swap(Kept(*found_by, datetime.now(UTC).isoformat(), text), there):
                return True

    def lookup(self, problem: Problem, objective: Objective = "makespan") -> Hit | None:
        """The schedule of this very problem, else the one of the nearest problem of the same shape that passes `check`
        on this one."""
        entry = _read(self._shelf.entry(problem.sha256, objective))
        if entry and (schedule := _fitting(entry, problem)):
            return Hit(schedule, 0.0, True, entry.status, entry.lower_bound_ms, entry)
        wanted = features(problem)
        others = ((_distance(wanted, text), sha256) for sha256, text in self._shelf.similar(shape(problem), objective))
        nearest = sorted((far, sha256) for far, sha256 in others if far is not None and sha256 != problem.sha256)
        for far, sha256 in nearest[:MOST_TRIED]:
            entry = _read(self._shelf.entry(sha256, objective))
            if entry and (schedule := _fitting(entry, problem)):
                return Hit(schedule, far, False, "feasible", None, entry)
        return None

    def entries(self) -> list[Entry]:
        """All that is kept, newest first."""
        return [entry for text in self._shelf.entries() if (entry := _read(text))]

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
        return self._shelf.prune(min(keep, MOST_KEPT))


def _read(text: str | None) -> Entry | None:
    """An entry of the shelf; None where an older release or a damaged file left something that is none."""
    try:
        return Entry.model_validate_json(text) if text is not None else None
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
