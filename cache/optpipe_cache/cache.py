"""`Cache`: solved schedules, one per problem and objective; which one is kept, and which one is found."""

from __future__ import annotations

import logging
import os
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import ValidationError

from optpipe.errors import InputError, ScheduleError, input_error
from optpipe.evaluate.objective import Objective, gap, length_ms, reaches
from optpipe.model.problem import Problem
from optpipe.model.records import Record, TotalMs
from optpipe.process.protocol import Programs
from optpipe.reuse.adapt import adapt
from optpipe.schedule import Found, Schedule, check
from optpipe_cache.features import REACH, STEP, Features, features, structure
from optpipe_cache.storage import FileStorage, Storage, StoredRow

log = logging.getLogger("optpipe.cache")

MOST_KEPT = 2**63 - 1  # the largest LIMIT of SQL
RINGS = (6, 12, 18, 25, 35, round(REACH / STEP))  # steps within which a lookup looks, one after the other
MOST_COMPARED = 4096  # similar entries of a ring whose features it reads
MOST_ENTRIES = 100_000  # in a cache, if nothing else is said
MOST_TRIED = 16  # similar entries that a lookup verifies before it gives up
MOST_ADAPTED = 2  # of these, the nearest: to adapt one takes up to a second
MOST_OPS = 10_000  # of a schedule that is adapted


class Entry(Record):
    """A solved schedule as it is stored and exported: a line of JSON of the format `optpipe.cache/1`."""

    format: Literal["optpipe.cache/1"] = "optpipe.cache/1"
    problem: Problem
    objective: Objective
    objective_ms: TotalMs
    status: Found
    lower_bound_ms: TotalMs | None = None
    method: str
    programs: Programs

    def schedule(self, problem: Problem | None = None) -> Schedule:
        """Return its schedule, for `problem` if one is given. Raises `InputError` if an op cannot be read."""
        return self.programs.schedule(problem or self.problem, self.method)

    def beats(self, other: Entry) -> bool:
        """Return whether it is shorter, or as short with a better bound."""
        return (self.objective_ms, -(self.lower_bound_ms or 0.0)) < (other.objective_ms, -(other.lower_bound_ms or 0.0))


@dataclass(frozen=True)
class Hit:
    """A schedule found for a problem, and verified on exactly that problem.

    Attributes
    ----------
    distance
        By `optpipe_cache.distance`; 0 if `exact`.
    terms
        What each feature adds to the distance, the largest first.
    exact
        Whether it was solved for this very problem.
    status, lower_bound_ms
        `optimal` and a bound only if `exact`.
    entry
        What it was solved for.
    """

    schedule: Schedule
    distance: float
    exact: bool
    status: Found
    lower_bound_ms: float | None
    entry: Entry
    terms: dict[str, float] = field(default_factory=dict)


def default_path() -> Path:
    """Return `$OPTPIPE_CACHE`, else `optpipe/schedules.sqlite` in the user's cache folder."""
    if path := os.environ.get("OPTPIPE_CACHE"):
        return Path(path)
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise InputError("the cache has no path: this user has no home folder, and OPTPIPE_CACHE is not set") from None
    return folder / "optpipe" / "schedules.sqlite"


class Cache:
    """Solved schedules in a storage, or in the file of a path, which threads and processes can share.

    Raises what its storage raises: `InputError` if a file cannot be opened or is not a cache.
    """

    def __init__(self, storage: Storage | str | Path, most: int = MOST_ENTRIES) -> None:
        """`most` entries are kept: of more, those go whose last use is longest ago."""
        self.storage: Storage = FileStorage(storage) if isinstance(storage, str | Path) else storage
        self._most = most

    def add(
        self,
        schedule: Schedule,
        status: Found,
        lower_bound_ms: float | None = None,
        objective: Objective = "makespan",
        *,
        verified: bool = False,
    ) -> bool:
        """Store a schedule unless a better one of its problem is there; return whether it was stored.

        Parameters
        ----------
        lower_bound_ms
            A bound on the objective. `optimal` needs one that proves it: a user who finds such an entry searches no
            more.
        verified
            The caller has called `check` on this schedule, so it is not checked again.

        Raises
        ------
        ScheduleError
            If the schedule is not valid.
        InputError
            If the bound is above the schedule's own length, or `optimal` is not proven.
        """
        if not verified and (wrong := check(schedule.problem, schedule)):
            raise ScheduleError(f"the schedule is not valid and was not added: {wrong[0]}")
        value = length_ms(schedule, objective)
        if lower_bound_ms is not None and not reaches(lower_bound_ms, value):
            raise InputError(
                f"lower_bound_ms = {lower_bound_ms}: the schedule has a {objective} of {value} ms, a bound is not "
                "above it"
            )
        if status == "optimal" and gap(value, lower_bound_ms) != 0:
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
                programs=Programs.of(replace(schedule, placement=None)),  # for `problem` as it is
            )
        except ValidationError as error:
            raise input_error(error, "cache") from None
        return self._store(entry)

    def _store(self, entry: Entry) -> bool:
        problem, text, known_by = entry.problem, entry.model_dump_json(exclude_none=True), features(entry.problem)
        found_by = problem.sha256, entry.objective, structure(problem), known_by.packed, known_by.cell
        while True:  # until no other process has changed the entry in between
            stored = self.storage.entry(problem.sha256, entry.objective)
            known = _read(stored)
            if known and not entry.beats(known) and _valid_schedule(known, problem):
                return False
            if self.storage.swap(StoredRow(*found_by, _now(), 0, text), stored):
                if stored is None:
                    self.prune(self._most)
                return True

    def lookup(self, problem: Problem, objective: Objective = "makespan") -> Hit | None:
        """Return the best known schedule, verified on this problem; None if there is none.

        It is the schedule of this very problem, else that of the most similar one in reach of the same structure whose
        order is valid for this one or, of the nearest two, can be adapted to it.
        """
        hit = self._exact(problem, objective) or self._nearest(problem, objective)
        if hit:
            self.storage.found(hit.entry.problem.sha256, objective, _now())
        return hit

    def neighbours(self, problem: Problem, objective: Objective = "makespan") -> Iterator[tuple[float, str]]:
        """Yield (distance, hash of the problem) of other problems of the same structure in reach, the nearest first."""
        wanted, of = features(problem), (structure(problem), objective)
        beyond, waiting = -1, list[tuple[float, str]]()
        for reach in RINGS:
            near = self.storage.similar(*of, wanted.cells(reach, beyond), MOST_COMPARED)
            waiting = sorted(waiting + [found for found in _distances(wanted, near) if found[1] != problem.sha256])
            sure = bisect(waiting, reach * STEP, key=lambda found: found[0])
            yield from waiting[:sure]
            beyond, waiting = reach, waiting[sure:]

    def _exact(self, problem: Problem, objective: Objective) -> Hit | None:
        entry = _read(self.storage.entry(problem.sha256, objective))
        if entry and (schedule := _valid_schedule(entry, problem)):
            return Hit(schedule, 0.0, True, entry.status, entry.lower_bound_ms, entry)
        return None

    def _nearest(self, problem: Problem, objective: Objective) -> Hit | None:
        wanted = features(problem)
        for n, (far, sha256) in enumerate(islice(self.neighbours(problem, objective), MOST_TRIED)):
            entry = _read(self.storage.entry(sha256, objective))
            schedule = entry and (_valid_schedule(entry, problem) or (n < MOST_ADAPTED and _adapted(entry, problem)))
            if entry and schedule:
                return Hit(schedule, far, False, "feasible", None, entry, wanted.terms(features(entry.problem)))
        return None

    def entries(self) -> list[Entry]:
        """Return all entries, those used last first."""
        return [entry for entry, _ in self.entries_and_hits()]

    def entries_and_hits(self) -> list[tuple[Entry, int]]:
        """Return all entries, those used last first, and how often each was found."""
        return [(entry, hits) for text, hits in self.storage.entries() if (entry := _read(text))]

    def export_lines(self) -> Iterator[str]:
        """Yield every entry as a line of JSON, for `import_lines` of another cache."""
        return (entry.model_dump_json(exclude_none=True) for entry in self.entries())

    def import_lines(self, lines: Iterable[str | bytes]) -> int:
        """Add exported entries, each verified, and stored only if it is better; return how many were.

        Raises `InputError` or `ScheduleError` with the line's number.
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
        """Delete all but the `keep` entries that were used last; return how many were deleted."""
        if keep < 0:
            raise InputError(f"keep = {keep}: must not be negative")
        return self.storage.prune(min(keep, MOST_KEPT))


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _read(text: str | None) -> Entry | None:
    """The entry in a stored text; None if it is damaged or of an older release, which is logged."""
    try:
        return Entry.model_validate_json(text) if text is not None else None
    except ValidationError as error:
        log.warning("skipped an entry that cannot be read: %s", input_error(error, "entry"))
        return None


def _distances(wanted: Features, near: Sequence[tuple[str, bytes]]) -> list[tuple[float, str]]:
    """(distance, problem_sha256) of the entries. Damaged ones are skipped."""
    length = len(wanted.packed)
    whole = [(sha256, packed) for sha256, packed in near if isinstance(packed, bytes) and len(packed) == length]
    if len(whole) < len(near):
        log.warning("skipped %d entries whose features cannot be read", len(near) - len(whole))
    steps = np.frombuffer(b"".join(packed for _, packed in whole), dtype="<i2").reshape(len(whole), length // 2)
    return list(zip(wanted.distances(steps).tolist(), (sha256 for sha256, _ in whole), strict=True))


def _valid_schedule(entry: Entry, problem: Problem) -> Schedule | None:
    try:
        schedule = entry.schedule(problem)
    except InputError:
        return None
    return None if check(problem, schedule) else schedule


def _adapted(entry: Entry, problem: Problem) -> Schedule | None:
    try:
        schedule = entry.schedule()
    except InputError:
        return None
    return adapt(problem, schedule, entry.objective) if sum(map(len, schedule.programs)) <= MOST_OPS else None
