"""`Cache`: solved schedules, one per problem and objective; which one is kept. `lookup` finds one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from optpipe.errors import InputError, ScheduleError, input_error
from optpipe.evaluate.objective import Objective, gap, length_ms, reaches
from optpipe.model.problem import Problem
from optpipe.process.protocol import Programs
from optpipe.schedule import Found, Schedule, check
from optpipe_cache.features import features, structure
from optpipe_cache.lookup import Entry, Hit, Lookup, read_entry
from optpipe_cache.storage import FileStorage, Retention, Source, Storage, StoredRow, release_pack

KEPT = Retention(keep=100_000)  # in a cache, by default


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


class Cache:
    """Solved schedules in a storage, or in the file of a path, which threads and processes can share.

    Raises what its storage raises: `InputError` if a file cannot be opened or is not a cache.
    """

    def __init__(self, storage: Storage | str | Path, kept: Retention = KEPT, pack: Source | None = None) -> None:
        """`kept` is applied when an entry is added. What is not here may be in a `pack`, such as `release_pack()`."""
        self.storage: Storage = FileStorage(storage) if isinstance(storage, str | Path) else storage
        self._kept, self._lookup = kept, Lookup(self.storage, pack)

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
        hit = self._lookup.best(problem, objective, only_exact)
        if hit and hit.source == "cache":
            self.storage.found(hit.entry.problem.sha256, objective, _now())
        return hit

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


def _now() -> str:
    return datetime.now(UTC).isoformat()
