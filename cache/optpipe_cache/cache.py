"""`Cache`: solved schedules, one per problem and objective; which one is kept, and which one is found."""

from __future__ import annotations

import logging
import math
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
from optpipe.reuse.adapt import adapt, most_ops
from optpipe.reuse.devices import resized
from optpipe.schedule import Found, Schedule, check
from optpipe_cache.features import REACH, STEP, Features, features, structure
from optpipe_cache.pack import release_pack
from optpipe_cache.seal import seal, user_folder
from optpipe_cache.storage import FileStorage, Retention, Source, Storage, StoredRow

log = logging.getLogger("optpipe.cache")

RINGS = (6, 12, 18, 25)  # steps: a lookup looks in the cells of one ring after the other, then anywhere
MOST_COMPARED = 4096  # similar entries of a ring whose features it reads
KEPT = Retention(keep=100_000)  # in a cache, if nothing else is said
MOST_TRIED = 16  # similar entries that a lookup verifies before it gives up
MOST_ADAPTED = 2  # of these, the nearest
MOST_OPS = 30_000  # of a schedule that is adapted, before and after
MOST_HANDLED = 60_000  # ops of all schedules that a lookup verifies


class Entry(Record):
    """A solved schedule as it is stored and exported: a line of JSON of the format `optpipe.cache/1`."""

    format: Literal["optpipe.cache/1"] = "optpipe.cache/1"
    problem: Problem
    objective: Objective
    objective_ms: TotalMs
    status: Found
    lower_bound_ms: TotalMs | None = None
    seal: str | None = None  # of the bound, by who has proven it; not exported
    method: str
    programs: Programs

    @property
    def ops(self) -> int:
        return sum(len(text.split()) for text in self.programs.programs)

    def schedule(self, problem: Problem | None = None) -> Schedule:
        """Return its schedule, for `problem` if one is given. Raises `InputError` if an op cannot be read."""
        return self.programs.schedule(problem or self.problem, self.method)

    def beats(self, length: float, bound: float | None) -> bool:
        """Return whether it is shorter than a schedule of this length, or as short with a better bound, in ms."""
        return (self.objective_ms, -(self.lower_bound_ms or 0.0)) < (length, -(bound or 0.0))

    def as_proven_here(self) -> Entry:
        """Return the entry without a bound, unless this user's own searches have sealed it."""
        if self.lower_bound_ms is None or (self.seal and self.seal == seal(*self.sealed)):
            return self
        return self.model_copy(update={"status": "feasible", "lower_bound_ms": None, "seal": None})

    @property
    def sealed(self) -> tuple[object, ...]:
        """What its seal vouches for."""
        return self.problem.sha256, self.objective, self.objective_ms, self.status, self.lower_bound_ms


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
    source
        Whether it was in the cache itself, or in the pack.
    """

    schedule: Schedule
    distance: float
    exact: bool
    status: Found
    lower_bound_ms: float | None
    entry: Entry
    terms: dict[str, float] = field(default_factory=dict)
    source: Literal["cache", "pack"] = "cache"


def default_path() -> Path:
    """Return `$OPTPIPE_CACHE`, else `optpipe/schedules.sqlite` in the user's cache folder."""
    if path := os.environ.get("OPTPIPE_CACHE"):
        return Path(path)
    try:
        return user_folder() / "schedules.sqlite"
    except RuntimeError:
        raise InputError("the cache has no path: this user has no home folder, and OPTPIPE_CACHE is not set") from None


def user_cache(path: Path | None = None) -> Cache:
    """Return the cache in a file, by default the user's own, with the release's pack behind it.

    Raises `InputError` if the file cannot be opened or is not a cache.
    """
    return Cache(path or default_path(), pack=release_pack())


class Cache:
    """Solved schedules in a storage, or in the file of a path, which threads and processes can share.

    Raises what its storage raises: `InputError` if a file cannot be opened or is not a cache.
    """

    def __init__(self, storage: Storage | str | Path, kept: Retention = KEPT, pack: Source | None = None) -> None:
        """`kept` is applied when an entry is added. What is not here may be in a `pack`, such as `release_pack()`."""
        self.storage: Storage = FileStorage(storage) if isinstance(storage, str | Path) else storage
        self._kept, self._pack = kept, pack

    def add(
        self,
        schedule: Schedule,
        status: Found,
        lower_bound_ms: float | None = None,
        objective: Objective = "makespan",
        *,
        verified: bool = False,
        claimed: bool = False,
    ) -> bool:
        """Store a schedule unless a better one of its problem is there; return whether it was stored.

        Parameters
        ----------
        lower_bound_ms
            A bound on the objective. `optimal` needs one that proves it: a user who finds such an entry searches no
            more.
        verified
            The caller has called `check` on this schedule, so it is not checked again.
        claimed
            Status and bound come from outside, such as a file: they must not contradict the schedule, but nothing here
            has proven them, so they are not kept.

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
        _require_proven(status, lower_bound_ms, value, objective)
        if claimed:
            status, lower_bound_ms = "feasible", None
        try:
            entry = Entry(
                problem=schedule.problem,
                objective=objective,
                objective_ms=value,
                status=status,
                lower_bound_ms=lower_bound_ms,
                method=schedule.method,
                programs=Programs.from_schedule(replace(schedule, placement=None)),  # for `problem` as it is
            )
        except ValidationError as error:
            raise input_error(error, "cache") from None
        if lower_bound_ms is not None and not self.storage.written_here_only:
            entry = entry.model_copy(update={"seal": seal(*entry.sealed)})
        return self._store(entry)

    def _store(self, entry: Entry) -> bool:
        problem, figures = entry.problem, features(entry.problem)
        row = StoredRow(
            problem_sha256=problem.sha256,
            objective=entry.objective,
            structure=structure(problem),
            features=figures.packed,
            cell=figures.cell,
            used=_now(),
            hits=0,
            entry=entry.model_dump_json(exclude_none=True),
        )
        while True:  # until no other process has changed the entry in between
            stored = self.storage.entry(problem.sha256, entry.objective)
            stored_entry = self._read(stored)
            if stored_entry and (kept := _valid_schedule(stored_entry, problem)):
                kept_ms = length_ms(kept, entry.objective)  # whatever its text says
                if not entry.beats(kept_ms, stored_entry.lower_bound_ms):
                    return False
            if self.storage.swap(row, stored):
                if stored is None:
                    self.storage.prune(self._kept)
                return True

    def lookup(self, problem: Problem, objective: Objective = "makespan") -> Hit | None:
        """Return the best known schedule, verified on this problem; None if there is none.

        It is the schedule of this very problem, else one adapted from that of the most similar one in reach of the
        same structure for which that is possible. Those after the nearest two must be valid as they are. Where there
        is none, the nearest on one device more or less is adapted. How much it does is counted in ops; what it gives up
        is logged.
        """
        hit = (
            self._exact(problem, objective)
            or self._nearest(problem, objective)
            or self._on_other_devices(problem, objective)
        )
        if hit and hit.source == "cache":
            self.storage.found(hit.entry.problem.sha256, objective, _now())
        return hit

    def neighbours(self, problem: Problem, objective: Objective = "makespan") -> Iterator[tuple[float, str]]:
        """Yield (distance, hash of the problem) of problems of the same structure in reach, the nearest first."""
        wanted, key = features(problem), structure(problem)
        inner, farther = -1.0, list[tuple[float, str]]()
        for outer in (*RINGS, REACH / STEP):  # one ring of cells after the other
            cells = wanted.cells(outer, inner) if outer in RINGS else None
            in_cells = _distances(wanted, self._in_cells(key, objective, cells))
            candidates = sorted({each for each in in_cells if each[0] > inner * STEP}.union(farther))
            in_ring = bisect(candidates, outer * STEP, key=lambda candidate: candidate[0])
            yield from candidates[:in_ring]
            inner, farther = outer, candidates[in_ring:]

    def _in_cells(self, structure: str, objective: Objective, cells: list[int] | None) -> list[tuple[str, bytes]]:
        """The features of what is in these cells, or anywhere; where that is too much, of what is in the first of
        them."""
        near = [*self.storage.similar(structure, objective, cells, MOST_COMPARED)]
        if len(near) == MOST_COMPARED and cells is not None:
            near = []
            for cell in cells:
                near += self.storage.similar(structure, objective, [cell], MOST_COMPARED - len(near))
                if len(near) == MOST_COMPARED:
                    break
        return [*near, *self._pack.similar(structure, objective, cells, MOST_COMPARED)] if self._pack else near

    def _exact(self, problem: Problem, objective: Objective) -> Hit | None:
        entry = self._entry(self.storage, problem.sha256, objective)
        if entry and (schedule := _valid_schedule(entry, problem)):
            share = gap(length_ms(schedule, objective), entry.lower_bound_ms)
            status: Found = "optimal" if share == 0 else "feasible"
            return Hit(schedule, 0.0, True, status, entry.lower_bound_ms, entry)
        return None

    def _nearest(self, problem: Problem, objective: Objective) -> Hit | None:
        wanted, handled = features(problem), 0
        for n, (far, sha256) in enumerate(islice(self.neighbours(problem, objective), MOST_TRIED)):
            source, entry = self._find_entry(sha256, objective)
            if source == "cache" and sha256 == problem.sha256:  # its schedule is not valid
                continue
            handled += entry.ops if entry else 0
            if n and handled > MOST_HANDLED:
                log.warning("a lookup was given up: it had verified schedules of %d ops, none was valid", handled)
                break
            schedule = entry and ((n < MOST_ADAPTED and _adapted(entry, problem)) or _valid_schedule(entry, problem))
            if entry and schedule:
                terms = wanted.terms(features(entry.problem))
                return Hit(schedule, far, False, "feasible", None, entry, terms, source)
        return None

    def _on_other_devices(self, problem: Problem, objective: Objective) -> Hit | None:
        p = len(problem.devices)
        for devices in (p + 1, p - 1):
            resized_problem = resized(problem, devices)
            if resized_problem is None:
                continue
            distance, sha256 = next(self.neighbours(resized_problem, objective), (math.inf, ""))
            devices_term = abs(math.log(devices / p))
            if distance + devices_term > REACH:
                continue
            source, entry = self._find_entry(sha256, objective)
            if entry and (schedule := _adapted(entry, problem)):
                terms = {"devices": devices_term, **features(resized_problem).terms(features(entry.problem))}
                total = distance + devices_term
                return Hit(schedule, total, False, "feasible", None, entry, terms, source)
        return None

    def _find_entry(self, sha256: str, objective: Objective) -> tuple[Literal["cache", "pack"], Entry | None]:
        entry = self._entry(self.storage, sha256, objective)
        if entry or not self._pack:
            return "cache", entry
        return "pack", self._entry(self._pack, sha256, objective)

    def _entry(self, source: Source, sha256: str, objective: Objective) -> Entry | None:
        """What the source has of this problem; None if it is damaged or of another one, which is logged."""
        entry = self._read(source.entry(sha256, objective))
        if entry and (entry.problem.sha256, entry.objective) != (sha256, objective):
            log.warning("skipped an entry that is of another problem than the one it is kept for")
            return None
        return entry

    def _read(self, text: str | None) -> Entry | None:
        """The entry in a stored text, with what is proven here; None if it is damaged, which is logged."""
        try:
            entry = Entry.model_validate_json(text) if text is not None else None
        except ValidationError as error:
            log.warning("skipped an entry that cannot be read: %s", input_error(error, "entry"))
            return None
        return entry if entry is None or self.storage.written_here_only else entry.as_proven_here()

    def entries(self) -> list[Entry]:
        """Return all entries, those used last first."""
        return [entry for entry, _ in self.entries_and_hits()]

    def entries_and_hits(self) -> list[tuple[Entry, int]]:
        """Return all entries, those used last first, and how often each was found."""
        return [(entry, hits) for text, hits in self.storage.entries() if (entry := self._read(text))]

    def export_lines(self) -> Iterator[str]:
        """Yield every entry as a line of JSON, for `import_lines` of another cache."""
        return (entry.model_dump_json(exclude_none=True, exclude={"seal"}) for entry in self.entries())

    def import_lines(self, lines: Iterable[str | bytes]) -> int:
        """Add exported entries, each verified, and stored only if it is better; return how many were. What they say of
        bounds is not kept.

        Raises `InputError` or `ScheduleError` with the line's number.
        """
        added = 0
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = Entry.model_validate_json(line)
                added += self.add(entry.schedule(), entry.status, entry.lower_bound_ms, entry.objective, claimed=True)
            except ValidationError as error:
                raise input_error(error, f"line {number}") from None
            except (InputError, ScheduleError) as error:
                raise type(error)(f"line {number}: {error}") from None
        return added

    def prune(self, keep: int | None = None, days: float | None = None) -> int:
        """Delete all but the `keep` entries that were used last, and those unused for `days`; return how many were
        deleted. Raises `InputError` for a negative number."""
        return self.storage.prune(Retention(keep, days))


def _require_proven(status: Found, lower_bound_ms: float | None, value: float, objective: Objective) -> None:
    """Raise InputError for a bound above the schedule's length `value`, and for `optimal` without a proof."""
    if lower_bound_ms is not None and not reaches(lower_bound_ms, value):
        raise InputError(
            f"lower_bound_ms = {lower_bound_ms}: the schedule has a {objective} of {value} ms, a bound is not above it"
        )
    if status == "optimal" and gap(value, lower_bound_ms) != 0:
        raise InputError(
            f"status = 'optimal': lower_bound_ms = {lower_bound_ms} does not prove it, the {objective} is {value} ms"
        )


def _now() -> str:
    return datetime.now(UTC).isoformat()


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
    schedule = _valid_schedule(entry, entry.problem)
    if schedule is None:
        return None
    if (ops := most_ops(problem, schedule)) > MOST_OPS:
        log.warning("a schedule was not adapted: of %d ops, more than %d would take too long", ops, MOST_OPS)
        return None
    return adapt(problem, schedule, entry.objective)
