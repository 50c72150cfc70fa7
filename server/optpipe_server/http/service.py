"""`Service`: what stands behind the routes, and what happens to a submission from its arrival to its first schedule."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import anyio.to_thread
from sqlalchemy import Row

from optpipe.errors import InputError
from optpipe.files import ScheduleFile
from optpipe.model.problem import Problem
from optpipe.process.child import Programs
from optpipe.schedule import Schedule
from optpipe_cache.features import shape
from optpipe_server.database import Database, Jobs, NewJob
from optpipe_server.database.jobs import CANCELLED_DETAIL, ConflictError, QueueFullError, StaleError, is_cancelled
from optpipe_server.database.keys import Keys
from optpipe_server.first_schedules import FirstSchedules
from optpipe_server.http.bodies import Model, Submission, parse
from optpipe_server.http.compute_queue import ComputeQueue
from optpipe_server.http.job_updates import JobUpdates
from optpipe_server.http.replies import ReplyError
from optpipe_server.metrics import FIRST, INCUMBENTS, SUBMITTED
from optpipe_server.settings import Settings
from optpipe_server.tenant_caches import TenantCaches
from optpipe_server.work import Reaper, Supervisor, default_worker_name

T = TypeVar("T")

QUESTIONS = 16  # to the database, at a time
THINKERS = 32  # submissions that wait for their first schedule at a time
SMALL_BODY = 2**15  # bytes, which are read in a millisecond
TRIES = 5  # at a problem that is posed while incumbents come in
CUT_S = 5.0  # from when the service is asked to end until it waits no longer for a database that hangs
SHORTLY = {"Retry-After": "10"}


class Service:
    """One process of the service. `open` and `close` belong to one event loop. Raises `InputError` for bad settings."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.database = Database(settings.database)
        self.jobs, self.keys = Jobs(self.database), Keys(self.database)
        self.caches = TenantCaches(settings, self.database)
        self.job_updates = JobUpdates(self.jobs, settings.streams)

    async def open(self) -> None:
        self._questions, self._thinkers = anyio.CapacityLimiter(QUESTIONS), anyio.CapacityLimiter(THINKERS)
        self._readers = anyio.CapacityLimiter(1)
        self.checks, self.pictures = ComputeQueue(), ComputeQueue()
        self.first_schedules = FirstSchedules(self.settings, self.caches)
        self.supervisor = Supervisor(self.settings, self.database, self.caches, default_worker_name())
        self.reaper = Reaper(self.database, self.supervisor.held)
        await self.query(self.reaper.start)
        self.supervisor.start()
        self._feeding = asyncio.create_task(self.job_updates.run())

    def closing(self) -> None:
        """Those who wait, for news or for a first schedule, are told to go, and searches end; from the loop, before
        `close`."""
        if not self.job_updates.closing:
            self.job_updates.close()
            ends = (
                self.first_schedules.close,
                self.supervisor.stop,
                self.reaper.stop,
            )  # none waits for another, nor for a place among the questions
            self._ended = asyncio.gather(self._feeding, *map(anyio.to_thread.run_sync, ends))
            asyncio.get_running_loop().call_later(CUT_S, self.database.abort_connections)

    async def close(self) -> None:
        self.closing()
        await self._ended
        self.database.close()

    async def query(self, question: Callable[[], T]) -> T:
        """The answer of the database, which may take its time; the loop goes on."""
        return await anyio.to_thread.run_sync(question, limiter=self._questions)

    async def read(self, model: type[Model], body: bytes, what: str) -> Model:
        """What a body says (`parse`); what is large is read beside the loop, one at a time. Raises `InputError` and
        `ReplyError`."""
        if len(body) <= SMALL_BODY:
            return parse(model, body, what)
        return await anyio.to_thread.run_sync(parse, model, body, what, limiter=self._readers)

    async def _think(self, thought: Callable[[], T]) -> T:
        """What the desk says, which may take seconds; who ends the service does not wait for it."""
        return await anyio.to_thread.run_sync(thought, limiter=self._thinkers, abandon_on_cancel=True)

    async def submit(self, tenant: str, submission: Submission, key: str | None, body: bytes) -> tuple[str, bool]:
        """Stores the job with its first schedule and has it searched; returns its id, and whether it is new.

        Raises `InputError`, and `ReplyError` for a full queue and for a key that came with another body before.
        """
        began = time.monotonic()
        job = NewJob(
            problem=submission.problem,
            method=submission.method,
            objective=submission.objective,
            time_limit_s=submission.time_limit_s,
            gap=submission.gap,
            priority=submission.priority,
        )
        start = await self._think(
            lambda: self.first_schedules.find(
                tenant, job.problem, job.method, job.objective, _given(submission.warm_start, job.problem)
            )
        )
        try:
            job_id, new = await self.query(
                lambda: self.jobs.add(tenant, job, start, queue=self.settings.queue, key=key, body_sha256=_sha256(body))
            )
        except QueueFullError:
            raise self._full() from None
        except ConflictError as error:
            raise ReplyError(422, str(error)) from None
        if new:
            SUBMITTED.inc()
            INCUMBENTS.inc(start.best.schedule is not None)
            self.supervisor.nudge()
            if (
                start.best.schedule is None and start.state == "queued"
            ):  # then the search may have one within the same time
                left_s = began + self.settings.first_schedule_s - time.monotonic()
                with suppress(ReplyError):  # the job is stored, whoever else watches
                    async with self.job_updates.subscribe(job_id, 1) as topic:
                        await topic.until(lambda topic: topic.over or bool(topic.events), max(0.0, left_s))
            FIRST.observe(time.monotonic() - began)
        return job_id, new

    async def submitted(self, tenant: str, key: str, body: bytes) -> str | None:
        """The job of this key and body. Raises `ReplyError` where the key came with another body."""
        try:
            return await self.query(lambda: self.jobs.submitted(tenant, key, _sha256(body)))
        except ConflictError as error:
            raise ReplyError(422, str(error)) from None

    async def change_problem(self, tenant: str, job_id: str, problem: Problem) -> None:
        """The job goes on with other costs, from its best schedule. Raises `ReplyError` where it cannot; `LookupError`
        where it is gone."""
        for _ in range(TRIES):
            if await self._pose_once(tenant, job_id, problem):
                self.supervisor.nudge()
                return
        raise ReplyError(409, "Better schedules come in faster than the problem can be changed; try again.")

    async def _pose_once(self, tenant: str, job_id: str, problem: Problem) -> bool:
        """False where an incumbent came in between, which the start of the other problem would have to be made from."""
        job, best = await self.query(lambda: self._best_for(tenant, job_id, problem))
        start = await self._think(
            lambda: self.first_schedules.find_after_change(tenant, problem, job.method, job.objective, best)
        )
        try:
            await self.query(
                lambda: self.jobs.change_problem(
                    tenant, job_id, problem, start, seen=job.last_seq, queue=self.settings.queue
                )
            )
        except StaleError:
            return False
        except QueueFullError:
            raise self._full() from None
        except ConflictError as error:
            raise ReplyError(409, str(error)) from None
        INCUMBENTS.inc(start.best.schedule is not None)
        return True

    def _best_for(self, tenant: str, job_id: str, problem: Problem) -> tuple[Row[Any], Schedule | None]:
        """A job, and its last schedule re-timed for other costs. Raises `ReplyError` where they are not costs of the
        same thing."""
        job = self.jobs.job(tenant, job_id)
        if job is None:
            raise LookupError(job_id)
        if is_cancelled(job):
            raise ReplyError(409, CANCELLED_DETAIL)
        if shape(Problem.from_json(job.problem)) != shape(problem):
            raise ReplyError(
                409,
                "The problem has other devices, stages, micro-batches, routes or ops than the job's; submit it anew.",
            )
        last = self.jobs.incumbent(job_id, job.last_seq)
        return job, Programs.model_validate_json(last.programs).schedule(problem, last.method) if last else None

    def _full(self) -> ReplyError:
        return ReplyError(429, f"{self.settings.queue} jobs are waiting already.", SHORTLY)


def _given(file: ScheduleFile | None, problem: Problem) -> Schedule | None:
    """A client's own schedule, read for the problem."""
    if file is None:
        return None
    try:
        return Schedule.parse(problem, (device.program for device in file.devices), file.links, file.method)
    except InputError as error:
        raise InputError(f"job: warm_start: {error}") from None


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
