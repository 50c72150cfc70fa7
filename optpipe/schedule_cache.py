"""A cache as a search uses it: where it starts, and where better schedules are kept.

`optpipe_cache.Cache` is a `ScheduleCache`. The core and the runtime know no other part of it.
"""

from __future__ import annotations

from typing import Protocol

from optpipe.errors import OptPipeError
from optpipe.evaluate.objective import Objective, length_ms
from optpipe.model.problem import Problem
from optpipe.schedule import Found, Schedule, check


class Hit(Protocol):
    """A schedule that is valid for the problem asked about, and what was proven of it there."""

    @property
    def schedule(self) -> Schedule: ...

    @property
    def status(self) -> Found: ...

    @property
    def lower_bound_ms(self) -> float | None: ...

    @property
    def source(self) -> str:
        """`cache`, or where else it was found."""


class ScheduleCache(Protocol):
    """Solved schedules. Both methods raise `OptPipeError` if the cache cannot be used; searches then go on without."""

    def lookup(self, problem: Problem, objective: Objective = "makespan") -> Hit | None:
        """Return a schedule of this problem, or one adapted to it."""

    def add(
        self,
        schedule: Schedule,
        status: Found,
        lower_bound_ms: float | None = None,
        objective: Objective = "makespan",
        *,
        verified: bool = False,
    ) -> object:
        """Keep a schedule if it is better than the one that is there for its problem."""


def better_start(problem: Problem, warm_start: Schedule | None, hit: Hit, objective: Objective) -> Schedule:
    """The shorter of two schedules to start from; the hit if the warm start is not valid for this problem."""
    if warm_start is None:
        return hit.schedule
    try:
        candidates = [hit.schedule] if check(problem, warm_start) else [warm_start, hit.schedule]
        return min(candidates, key=lambda schedule: length_ms(schedule.on(problem), objective))
    except (OptPipeError, LookupError):  # it is of other stages
        return hit.schedule


class SearchCache:
    """A search's use of a cache, if it has one.

    An error of the cache becomes a note, and so does a schedule from elsewhere, such as the pack; the search goes on.
    """

    def __init__(self, cache: ScheduleCache | None) -> None:
        self._cache = cache
        self._kept: tuple[Schedule | None, float | None] = None, None
        self.note: str | None = None

    def hit(self, problem: Problem, objective: Objective) -> Hit | None:
        """What the cache has."""
        try:
            hit = self._cache.lookup(problem, objective) if self._cache else None
        except OptPipeError as error:
            self.note = str(error)
            return None
        if hit and hit.source != "cache":
            ms = length_ms(hit.schedule, objective)
            self.note = f"the search began with a schedule of {ms:.6g} ms from the {hit.source}"
        return hit

    def keep(self, schedule: Schedule, status: Found, lower_bound_ms: float | None, objective: Objective) -> None:
        """Stores what the search has found, once."""
        kept_schedule, kept_bound_ms = self._kept
        if self._cache is None or (kept_schedule is schedule and kept_bound_ms == lower_bound_ms):
            return
        self._kept = schedule, lower_bound_ms
        try:
            self._cache.add(schedule, status, lower_bound_ms, objective, verified=True)
        except OptPipeError as error:
            self.note = str(error)
