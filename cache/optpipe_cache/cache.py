"""`Cache`: solved schedules, one `Entry` per problem and objective: which is kept, and which answers a problem."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
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
from optpipe.reuse import adapt, most_ops, resized
from optpipe.schedule import Found, Schedule, check
from optpipe_cache.features import REACH, features, structure
from optpipe_cache.storage import FileStorage, Retention, Source, Storage, StoredRow, release_pack

log = logging.getLogger("optpipe.cache")

KEPT = Retention(keep=100_000)  # in a cache, by default
MOST_COMPARED = 5_000  # entries of the same structure, those used last
MOST_TRIED = 16  # similar entries that a lookup verifies before it gives up
MOST_ADAPTED = 2  # of these, the nearest
MOST_OPS = 30_000  # of a schedule that is adapted, before and after
MOST_HANDLED = 60_000  # ops of all schedules that a lookup verifies


def default_path() -> Path:
    """Return `$OPTPIPE_CACHE`, else `optpipe/schedules.sqlite` in the user's cache folder."""
    if path := os.environ.get("OPTPIPE_CACHE"):
        return Path(path)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optpipe" / "schedules.sqlite"
    except RuntimeError:
        raise InputError("the cache has no path: this user has no home folder, and OPTPIPE_CACHE is not set") from None


def user_cache(path: Path | None = None) -> Cache:
    """Return the cache in a file, by default the user's own, with the release's pack behind it.

    Raises `InputError` if the file cannot be opened or is not a cache.
    """
    return Cache(path or default_path(), pack=release_pack())


class Entry(Record):
    """A solved schedule as it is stored and exported: a line of JSON of the format `optpipe.cache/1`."""

    format: Literal["optpipe.cache/1"] = "optpipe.cache/1"
    problem: Problem
    objective: Objective
    objective_ms: TotalMs
    status: Found
    lower_bound_ms: TotalMs | None = None  # not exported
    method: str
    programs: Programs

    @property
    def ops(self) -> int:
        return sum(len(text.split()) for text in self.programs.programs)

    def schedule(self, problem: Problem | None = None) -> Schedule:
        """Return its schedule, for `problem` if there is one. Raises `InputError` if an op cannot be read."""
        return self.programs.schedule(problem or self.problem, self.method)

    def beats(self, length: float, bound: float | None) -> bool:
        """Return whether it is shorter than this length (ms), or as short with a better bound."""
        return (self.objective_ms, -(self.lower_bound_ms or 0.0)) < (length, -(bound or 0.0))

    def valid_schedule(self, problem: Problem) -> Schedule | None:
        """Return its schedule for this problem; None if it is not valid."""
        with suppress(InputError):
            schedule = self.schedule(problem)
            return None if check(problem, schedule) else schedule
        return None

    def exported(self) -> str:
        """Return it as a line of JSON without what only this cache has proven."""
        return self.model_copy(update={"status": "feasible", "lower_bound_ms": None}).model_dump_json(exclude_none=True)


def read_entry(text: str | None) -> Entry | None:
    """Return the entry in a stored text; None if it is damaged, which is logged."""
    try:
        return Entry.model_validate_json(text) if text is not None else None
    except ValidationError as error:
        log.warning("skipped an entry that cannot be read: %s", input_error(error, "entry"))
        return None


@dataclass(frozen=True)
class Hit:
    """A schedule found for a problem, and verified on exactly that problem."""

    schedule: Schedule
    distance: float  # by `optpipe_cache.distance`; 0 if `exact`
    exact: bool  # whether it was solved for this very problem
    status: Found  # `optimal` only if `exact`
    lower_bound_ms: float | None  # only if `exact`
    entry: Entry  # what it was solved for
    terms: dict[str, float] = field(default_factory=dict)  # what each feature adds to the distance, the largest first
    source: Literal["cache", "pack"] = "cache"


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
    ) -> bool:
        """Store a schedule unless a better one of its problem is there; return whether it was stored.

        `status` and bound are what a search here has proven of the objective; of a schedule from outside, `feasible`
        and no bound. `optimal` needs a bound that proves it: a user who finds such an entry searches no more. A
        `verified` schedule, which the caller has checked, is not checked again.

        Raises ScheduleError if the schedule is not valid, InputError if the bound is above the schedule's own length or
        `optimal` is not proven.
        """
        if not verified and (wrong := check(schedule.problem, schedule)):
            raise ScheduleError(f"the schedule is not valid and was not added: {wrong[0]}")
        value = length_ms(schedule, objective)
        if lower_bound_ms is not None and not reaches(lower_bound_ms, value):
            longer = f"the schedule has a {objective} of {value} ms, a bound is not above it"
            raise InputError(f"lower_bound_ms = {lower_bound_ms}: {longer}")
        if status == "optimal" and gap(value, lower_bound_ms) != 0:
            unproven = f"lower_bound_ms = {lower_bound_ms} does not prove it, the {objective} is {value} ms"
            raise InputError(f"status = 'optimal': {unproven}")
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
        return self._store(entry)

    def _store(self, entry: Entry) -> bool:
        problem = entry.problem
        row = StoredRow(
            problem_sha256=problem.sha256,
            objective=entry.objective,
            structure=structure(problem),
            features=features(problem).packed,
            used=_now(),
            hits=0,
            entry=entry.model_dump_json(exclude_none=True),
        )
        while True:  # until no other process has changed the entry in between
            stored = self.storage.entry(problem.sha256, entry.objective)
            stored_entry = read_entry(stored)
            if stored_entry and (kept := stored_entry.valid_schedule(problem)):
                kept_ms = length_ms(kept, entry.objective)  # whatever its text claims
                if not entry.beats(kept_ms, stored_entry.lower_bound_ms):
                    return False
            if self.storage.swap(row, stored):
                if stored is None:
                    self.storage.prune(self._kept)
                return True

    def lookup(self, problem: Problem, objective: Objective = "makespan", only_exact: bool = False) -> Hit | None:
        """Return the best schedule, verified on this problem; None if there is none. `only_exact` adapts no other one,
        which takes some 50 ms.

        It is the schedule of this very problem, else one adapted from that of the most similar one in reach of the
        same structure for which that is possible. Those after the nearest two must be valid as they are. Where there
        is none, the nearest on one device more or less is adapted. How much it does is counted in ops; what it gives up
        is logged.
        """
        entry = self._entry(self.storage, problem.sha256, objective)
        hit: Hit | None = None
        if entry and (schedule := entry.valid_schedule(problem)):
            share = gap(length_ms(schedule, objective), entry.lower_bound_ms)
            hit = Hit(schedule, 0.0, True, "optimal" if share == 0 else "feasible", entry.lower_bound_ms, entry)
        elif not only_exact:
            hit = self._nearest(problem, objective) or self._on_other_devices(problem, objective)
        if hit and hit.source == "cache":
            self.storage.found(hit.entry.problem.sha256, objective, _now())
        return hit

    def neighbours(self, problem: Problem, objective: Objective = "makespan") -> Iterator[tuple[float, str]]:
        """Yield (distance, hash of the problem) of problems of the same structure in reach, the nearest first."""
        wanted, key = features(problem), structure(problem)
        sources = (self.storage, self._pack) if self._pack else (self.storage,)
        near = [row for source in sources for row in source.similar(key, objective, MOST_COMPARED)]
        length = len(wanted.packed)
        whole = [(sha256, packed) for sha256, packed in near if isinstance(packed, bytes) and len(packed) == length]
        if len(whole) < len(near):
            log.warning("skipped %d entries whose features cannot be read", len(near) - len(whole))
        steps = np.frombuffer(b"".join(packed for _, packed in whole), dtype="<i2").reshape(len(whole), length // 2)
        rows = zip(wanted.distances(steps).tolist(), (sha256 for sha256, _ in whole), strict=True)
        yield from sorted({(far, sha256) for far, sha256 in rows if far <= REACH})

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
            schedule = entry and ((n < MOST_ADAPTED and _adapted(entry, problem)) or entry.valid_schedule(problem))
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
        entry = read_entry(source.entry(sha256, objective))
        if entry and (entry.problem.sha256, entry.objective) != (sha256, objective):
            log.warning("skipped an entry that is of another problem than the one it is kept for")
            return None
        return entry

    def entries(self) -> list[Entry]:
        """Return all entries, those used last first."""
        return [entry for entry, _ in self.entries_and_hits()]

    def entries_and_hits(self) -> list[tuple[Entry, int]]:
        """Return all entries, those used last first, and how often each was found."""
        return [(entry, hits) for text, hits in self.storage.entries() if (entry := read_entry(text))]

    def export_lines(self) -> Iterator[str]:
        """Yield every entry as a line of JSON, for `import_lines` of another cache."""
        return (entry.exported() for entry in self.entries())

    def import_lines(self, lines: Iterable[str | bytes]) -> int:
        """Add exported entries, each verified, and stored only if it is better; return how many were. Their bounds are
        not kept: nothing here has proven them.

        Raises `InputError` or `ScheduleError` with the line's number.
        """
        added = 0
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = Entry.model_validate_json(line)
                added += self.add(entry.schedule(), "feasible", objective=entry.objective)
            except ValidationError as error:
                raise input_error(error, f"line {number}") from None
            except (InputError, ScheduleError) as error:
                raise type(error)(f"line {number}: {error}") from None
        return added

    def prune(self, keep: int | None = None, days: float | None = None) -> int:
        """Delete all but the `keep` entries that were used last, and those unused for `days`; return how many were
        deleted. Raises `InputError` for a negative number."""
        return self.storage.prune(Retention(keep, days))


def _adapted(entry: Entry, problem: Problem) -> Schedule | None:
    schedule = entry.valid_schedule(entry.problem)
    if schedule is None:
        return None
    if (ops := most_ops(problem, schedule)) > MOST_OPS:
        log.warning("a schedule was not adapted: of %d ops, more than %d would take too long", ops, MOST_OPS)
        return None
    return adapt(problem, schedule, entry.objective)


def _now() -> str:
    return datetime.now(UTC).isoformat()
