"""`Entry`, a solved schedule as it is stored, and `Lookup`: which entry answers a problem, verified on it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import numpy as np
from pydantic import ValidationError

from optpipe.errors import InputError, input_error
from optpipe.evaluate.objective import Objective, gap, length_ms
from optpipe.model.problem import Problem
from optpipe.model.records import Record, TotalMs
from optpipe.process.protocol import Programs
from optpipe.reuse import adapt, most_ops, resized
from optpipe.schedule import Found, Schedule, check
from optpipe_cache.features import REACH, features, structure
from optpipe_cache.storage import Source, Storage

log = logging.getLogger("optpipe.cache")

MOST_COMPARED = 5_000  # entries of the same structure, those used last
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


class Lookup:
    """Finds schedules in a storage and in a pack."""

    def __init__(self, storage: Storage, pack: Source | None) -> None:
        self._storage, self._pack = storage, pack

    def best(self, problem: Problem, objective: Objective, only_exact: bool = False) -> Hit | None:
        """Return the best schedule, as `Cache.lookup` does."""
        entry = self._entry(self._storage, problem.sha256, objective)
        if entry and (schedule := entry.valid_schedule(problem)):
            share = gap(length_ms(schedule, objective), entry.lower_bound_ms)
            return Hit(schedule, 0.0, True, "optimal" if share == 0 else "feasible", entry.lower_bound_ms, entry)
        if only_exact:
            return None
        return self._nearest(problem, objective) or self._on_other_devices(problem, objective)

    def neighbours(self, problem: Problem, objective: Objective = "makespan") -> Iterator[tuple[float, str]]:
        """Yield (distance, hash of the problem) of problems of the same structure in reach, the nearest first."""
        wanted, key = features(problem), structure(problem)
        sources = (self._storage, self._pack) if self._pack else (self._storage,)
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
        entry = self._entry(self._storage, sha256, objective)
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


def _adapted(entry: Entry, problem: Problem) -> Schedule | None:
    schedule = entry.valid_schedule(entry.problem)
    if schedule is None:
        return None
    if (ops := most_ops(problem, schedule)) > MOST_OPS:
        log.warning("a schedule was not adapted: of %d ops, more than %d would take too long", ops, MOST_OPS)
        return None
    return adapt(problem, schedule, entry.objective)
