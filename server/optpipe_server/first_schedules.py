"""`FirstSchedules`: the best schedule of a problem before any worker searches.

It comes from the cache, from the client, or from the pool. Schedules of the pool's processes are verified here; their
bounds, and their word that a problem is infeasible, are taken as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

import anyio
import anyio.to_thread
import structlog

from optpipe import solvers
from optpipe.anytime import Keeper
from optpipe.errors import InputError
from optpipe.formats.stacks import STACKS
from optpipe.model.problem import Problem
from optpipe.options import SolveOptions
from optpipe.process.protocol import Frame, Programs, Request
from optpipe.results import Result, merged
from optpipe.schedule import Schedule, check
from optpipe_server import accepted
from optpipe_server.database import InitialResult
from optpipe_server.database.tables import Source
from optpipe_server.metrics import CACHE, REJECTED
from optpipe_server.pool import BUSY, Pool, TaskError, schedules
from optpipe_server.service_cache import ServiceCache

T = TypeVar("T")

log = structlog.get_logger("optpipe.server")

PUBLISHED_S = 1.0  # of processor time: for published schedules, and as much for those on other stages
HURRIED_S = 0.05  # likewise where many wait, without other stages: less than what is worth a search by rules
CHECKS_AT_ONCE = 4  # schedules that are looked up or verified
CHECK_S_PER_PART = 5e-6  # to read and verify a schedule here, per activation part

ReadSchedule = Callable[[], Schedule]  # read when it is its turn: a large one takes seconds and much memory


class FirstSchedules:
    """Finds the first schedules of submissions; used from one event loop."""

    def __init__(self, pool: Pool, cache: ServiceCache) -> None:
        self._pool, self._cache = pool, cache
        self.waiting = 0  # submissions; where several do, no schedule is adapted, and none is searched by rules
        self._large, self._checks = anyio.CapacityLimiter(1), anyio.CapacityLimiter(CHECKS_AT_ONCE)

    @property
    def _is_hurried(self) -> bool:
        return self.waiting > 1

    async def check(self, check: Callable[[], T]) -> T:
        """Run what looks schedules up or verifies them in a thread, a few at a time; the end of the service does not
        wait for it."""
        return await anyio.to_thread.run_sync(check, limiter=self._checks, abandon_on_cancel=True)

    async def find(
        self,
        problem: Problem,
        options: SolveOptions,
        offered: ReadSchedule | None,
        source: Source,
        deadline: float,
    ) -> InitialResult:
        """Return the best that can be found until `deadline`, by `time.monotonic`. Large problems take turns, as each
        takes much memory; one whose turn does not come in time gets none.

        `offered` reads the schedule that comes from this `source`: the client's, or for a job whose costs have changed
        the best one for the former costs. It counts if it is valid.

        Raises `InputError` if the method is unknown or does not apply to this problem, or `offered` cannot be read;
        `TaskError` if a client's schedule would be left out because the turn of its large problem does not come in
        time.
        """
        solvers.require_method(options.method)  # whether or not the pool answers in time
        parts, options = accepted.count_parts(problem), options.for_problem(problem)
        async with AsyncExitStack() as turns:
            if parts > accepted.LARGE:
                with anyio.move_on_after(deadline - time.monotonic()) as waiting:
                    await turns.enter_async_context(self._large)
                    await turns.enter_async_context(self._pool.slow)
                if waiting.cancelled_caught:
                    if offered is not None and source == "warm_start":
                        raise TaskError(BUSY)
                    return InitialResult()
            initial, to_repair = await self.check(partial(self._known, problem, options, offered, source))
            if initial.best.status == "optimal":
                return initial
            limit_s = HURRIED_S if self._is_hurried else PUBLISHED_S
            asked = {**options.arguments(), "threads": 1, "time_limit_s": limit_s}
            request = Request.model_validate({"problem": problem, "warm_start": to_repair, **asked})
            left_s = deadline - time.monotonic()
            until = deadline - min(left_s / 2, CHECK_S_PER_PART * parts)  # an answer is verified, too
            text, frames = request.model_dump_json(exclude_none=True), list[Frame]()
            with suppress(TaskError):
                module = solvers.installed().FIRST
                frames = await self._pool.run(schedules.first_schedules, module, text, until=until)
            return await self.check(partial(self._best, initial, request, frames, options))

    def _known(
        self,
        problem: Problem,
        options: SolveOptions,
        offered: ReadSchedule | None,
        source: Source,
    ) -> tuple[InitialResult, Programs | None]:
        """What the cache or the client has, and the latter's schedule where it needs repair."""
        schedule = offered() if offered else None
        initial = InitialResult(self._cached(problem, options), "cache")
        if schedule is None or initial.best.status == "optimal":
            return initial, None
        placement = schedule.placement if options.placements == "all" else None
        placed = placement.apply(problem) if placement else problem
        retimed = replace(schedule, problem=placed, placement=placement)
        if check(placed, retimed):
            return initial, Programs.from_schedule(retimed)
        if STACKS[options.stack].complaint(retimed):
            return initial, None
        return _better(initial, InitialResult(Result.from_schedule(retimed, options), source)), None

    def _cached(self, problem: Problem, options: SolveOptions) -> Result:
        """What the cache has; a heuristic or a published schedule that is asked for is computed anew."""
        hit = None
        if options.starts_from_known:
            try:
                hit = self._cache.open().lookup(problem, options.objective, self._is_hurried)
                CACHE.labels("miss" if hit is None else "exact" if hit.exact else "near").inc()
            except InputError as error:
                log.warning("the cache cannot be used", why=str(error))
                CACHE.labels("failed").inc()
        if hit is None or STACKS[options.stack].complaint(hit.schedule):
            return Result("unknown", objective=options.objective)
        bound_ms = hit.lower_bound_ms if options.placements == "keep" else None  # other stages may be faster
        return Result.from_schedule(hit.schedule, options, bound_ms)

    def _best(
        self, initial: InitialResult, request: Request, frames: Sequence[Frame], options: SolveOptions
    ) -> InitialResult:
        first = _better(initial, InitialResult(_verified(request, frames), "heuristic"))
        if first.state(options) == "done":  # no worker will keep it
            self._cache.keep(first.best)
        return first


def _better(former: InitialResult, new: InitialResult) -> InitialResult:
    best = merged(former.best, new.best)
    return InitialResult(best, former.source if best.schedule is former.best.schedule else new.source)


def _verified(request: Request, frames: Sequence[Frame]) -> Result:
    """The best valid schedule, with its bound and what else the solver says."""
    keeper = Keeper(request.problem, request)
    for frame in frames:
        keeper.take(frame)
        if keeper.result.schedule is not None:  # those that follow are no better
            break
    result = keeper.end(None)
    if result.rejected:
        log.warning("first schedules were rejected", why=result.notes)
        REJECTED.inc(result.rejected)
    return result
