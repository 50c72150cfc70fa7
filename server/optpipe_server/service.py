"""The service behind the routes: what happens to a submission from its arrival to its first schedule."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from fastapi.concurrency import run_in_threadpool

from optpipe.anytime import Result
from optpipe.child import Objective
from optpipe.errors import InputError
from optpipe.files import ScheduleFile
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.validity import check
from optpipe_cache import Cache
from optpipe_server.changes import Changes, wait_for
from optpipe_server.http.bodies import Submission
from optpipe_server.http.replies import ReplyError
from optpipe_server.settings import Settings
from optpipe_server.solves import Solves, merged
from optpipe_server.store import OPEN, NewJob, Source, Store
from optpipe_server.views import job_view, whole_incumbent_view

log = logging.getLogger("optpipe.server")


class Service:
    """Database, cache and searches of one server. `open` and `close` belong to one event loop. Raises `InputError` for bad settings."""

    changes: Changes
    solves: Solves

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.cache = Cache(settings.cache)
        self.store = Store(settings.database)
        self._arriving = 0  # submissions that have been let in and are no open jobs yet; only the loop's thread counts

    def open(self) -> None:
        if interrupted := self.store.stop_open():
            log.warning("%d jobs were interrupted when the service last ended; their best schedules are kept", interrupted)
        self.changes = Changes(asyncio.get_running_loop())
        self.solves = Solves(self.settings, self.store, self.cache, self.changes.tell)

    async def close(self) -> None:
        self.changes.close()
        await run_in_threadpool(self.solves.close)
        self.store.close()

    async def submit(self, submission: Submission) -> str:
        """Stores the job, starts or queues its search, and waits for its first schedule; returns its id."""
        if self.solves.open_jobs + self._arriving >= self.settings.solves + self.settings.queue:
            raise ReplyError(429, f"{self.settings.queue} jobs are waiting already.", {"Retry-After": "10"})
        job = NewJob(submission.problem, submission.method, submission.objective, submission.time_limit_s)
        self._arriving += 1
        try:
            best, source, warm_start = await run_in_threadpool(self._known, submission)
            job_id = await run_in_threadpool(self.store.add_job, job, best if best.schedule else None, source)
            if best.status == "optimal":
                await run_in_threadpool(self.store.finish, job_id, "done", best)
                return job_id
            self.solves.submit(job_id, job, best, warm_start)
        finally:
            self._arriving -= 1
        if best.schedule is None:
            with self.changes.watching(job_id) as changed:
                await self._first_schedule(job_id, changed)
        return job_id

    def view(self, job_id: str) -> dict[str, Any] | None:
        """The job with its best schedule in full."""
        job = self.store.job(job_id)
        if job is None:
            return None
        best = self.store.incumbent(job_id)
        return job_view(job, whole_incumbent_view(job, best) if best else None)

    def _known(self, submission: Submission) -> tuple[Result, Source, Schedule | None]:
        """The best schedule that there is before any search, where it is from, and the one to start from if it does not fit."""
        problem, objective = submission.problem, submission.objective
        cached = self._cached(problem, objective)
        if submission.warm_start is None:
            return cached, "cache", None
        given = _given(submission.warm_start, problem)
        if check(problem, given):
            return cached, "cache", given
        best = merged(cached, Result("feasible", given, objective, method=given.method))
        return best, "warm_start" if best.schedule is given else "cache", given

    def _cached(self, problem: Problem, objective: Objective) -> Result:
        try:
            hit = self.cache.lookup(problem, objective)
        except InputError as error:
            log.warning("the cache was not asked: %s", error)
            hit = None
        if hit is None:
            return Result("unknown", objective=objective)
        return Result(hit.status, hit.schedule, objective, hit.lower_bound_ms, hit.schedule.method)

    async def _first_schedule(self, job_id: str, changed: asyncio.Event) -> None:
        """Until the job has a schedule or is over, for as long as a submission may wait."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.first_schedule_s
        while not self.changes.closing:
            changed.clear()
            if await run_in_threadpool(self._has_schedule_or_ended, job_id):
                return
            if not await wait_for(changed, max(0.0, deadline - loop.time())):
                return

    def _has_schedule_or_ended(self, job_id: str) -> bool:
        job = self.store.job(job_id)
        return job is None or job.state not in OPEN or self.store.incumbent(job_id) is not None


def _given(file: ScheduleFile, problem: Problem) -> Schedule:
    try:
        return Schedule.parse(problem, (device.program for device in file.devices), file.links, file.method)
    except InputError as error:
        raise InputError(f"job: warm_start: {error}") from None
