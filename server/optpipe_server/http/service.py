"""`Service`: what the routes work on, and the way of a submission from its arrival to its first schedule."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import anyio.to_thread
import structlog
from sqlalchemy import Row

from optpipe.errors import InputError
from optpipe.formats.stacks import restricted
from optpipe.model.problem import Problem
from optpipe.options import SolveOptions
from optpipe.process.protocol import Programs
from optpipe.schedule import Schedule, ScheduleFile, check
from optpipe_cache.features import structure
from optpipe_server.accepted import read_schedule
from optpipe_server.compiler import Compiler
from optpipe_server.database import Database, Jobs, NewJob
from optpipe_server.database.changes import CANCELLED_DETAIL, ConflictError, StaleError
from optpipe_server.database.engine import now
from optpipe_server.database.jobs import is_cancelled, options_of, prune
from optpipe_server.database.keys import Keys
from optpipe_server.first_schedules import FirstSchedules, ReadSchedule
from optpipe_server.http.job_updates import JobUpdates
from optpipe_server.http.replies import SOON_S, ReplyError
from optpipe_server.http.schemas import SCHEDULE, Submission
from optpipe_server.metrics import FIRST, INCUMBENTS, SUBMITTED
from optpipe_server.pool import Pool
from optpipe_server.service_cache import ServiceCache
from optpipe_server.settings import Settings
from optpipe_server.work import Rounds, default_worker_name, make_worker

T = TypeVar("T")
log = structlog.get_logger("optpipe.server")

EXAMPLE = ScheduleFile.model_validate(SCHEDULE).schedule()
QUERIES_AT_ONCE = 16
MOST_SUBMITTED = 64  # submissions that wait for their first schedules, about three seconds' worth
TRIES = 5  # to change a problem while incumbents come in
PRUNE_S = 2.0  # between two looks for jobs that are not kept
LEASES_S = 0.5  # between two looks for leases that are over
AWAY_S = 5.0  # without a look, as the database or this process was away
STOPPING_S = 5.0  # for jobs to be given back
PROBED_S = 1.0  # how long a probe of the database counts: anybody may ask, and each writes to the disk


class Service:
    """One process of the service; `open` and `close` belong to one event loop. Raises `InputError` for wrong
    settings."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.database = Database(settings.database)
        self.jobs, self.keys = Jobs(self.database), Keys(self.database)
        self.cache = ServiceCache(settings, self.database)
        self.job_updates = JobUpdates(self.jobs, settings.streams)

    async def open(self) -> None:
        anyio.to_thread.current_default_thread_limiter().total_tokens = QUERIES_AT_ONCE  # routes run in these threads
        self._probing, self._probed_at = asyncio.Lock(), -math.inf
        self.pool = Pool(self.settings.processes)
        self.first_schedules = FirstSchedules(self.pool, self.cache)
        self.compiler = Compiler(partial(check, EXAMPLE.problem, EXAMPLE))  # so that no submission waits for it
        self.compiler.start()
        self.worker = make_worker(self.settings, self.database, self.cache, default_worker_name())
        if self.settings.solves:
            self.worker.start()
        self._pruner = Rounds("prune", "old jobs cannot be deleted", PRUNE_S, self._prune)
        if self.settings.kept.limited:
            self._pruner.start()
        self._leases = Rounds("leases", "jobs whose training is gone cannot be cancelled", LEASES_S, self._cancel_gone)
        self._leases_read = -math.inf
        self._leases.start()
        self._feeding = asyncio.create_task(self.job_updates.run())

    def closing(self) -> None:
        """End all waits and searches; called in the event loop, before `close`."""
        if not self.job_updates.closing:
            self.job_updates.close()
            # In threads of their own: none waits for another, nor for a free query thread.
            stops: list[Callable[[], None]] = [self._pruner.stop, self._leases.stop, self.compiler.stop]
            if self.settings.solves:
                stops.append(partial(self.worker.stop, STOPPING_S))
            ends = [anyio.to_thread.run_sync(stop) for stop in stops]
            self._ended = asyncio.gather(self._feeding, self.pool.close(), *ends)

    def _prune(self) -> None:
        kept = self.settings.kept
        if old := prune(self.database, kept):
            log.info("deleted jobs that were over", jobs=old, keep=kept.keep, days=kept.days)

    def _cancel_gone(self) -> None:
        if time.monotonic() > self._leases_read + AWAY_S:  # nor could leases be renewed: they begin anew
            self._leases_since = now()
        self.jobs.cancel_gone(self._leases_since)
        self._leases_read = time.monotonic()

    async def close(self) -> None:
        self.closing()
        await self._ended
        self.database.close()

    async def query(self, query: Callable[[], T]) -> T:
        """Run a database query, which may take its time, in a thread."""
        return await anyio.to_thread.run_sync(query)

    async def probe(self) -> None:
        """Raise SQLAlchemy's error if the database does not store what is written, as of the last second."""
        self.database.require_same_file()
        async with self._probing:
            if time.monotonic() > self._probed_at + PROBED_S:
                await self.query(self.database.probe)
                self._probed_at = time.monotonic()

    async def submit(
        self, submission: Submission, key_name: str | None, idempotency_key: str | None, body: bytes
    ) -> tuple[str, bool]:
        """Store a job with its first schedule; return its id, and whether it is new. Raises as `Jobs.add`, `InputError`
        if the method is unknown or the warm start cannot be read, `ReplyError` (429) if too many wait for theirs."""
        if self.first_schedules.waiting >= MOST_SUBMITTED:
            raise ReplyError(429, f"busy: {MOST_SUBMITTED} submissions wait; retry in {SOON_S} s", retry_s=SOON_S)
        self.first_schedules.waiting += 1
        try:
            return await self._submit(submission, key_name, idempotency_key, body)
        finally:
            self.first_schedules.waiting -= 1

    async def _submit(
        self, submission: Submission, key_name: str | None, idempotency_key: str | None, body: bytes
    ) -> tuple[str, bool]:
        began, sha256 = time.monotonic(), hashlib.sha256(body).hexdigest()
        former = idempotency_key and await self.query(partial(self.jobs.submitted, idempotency_key, sha256))
        if former:
            return former, False
        self.database.require_same_file()
        options, file = SolveOptions(**submission.arguments()), submission.warm_start
        problem = restricted(submission.problem, options)
        options = options.for_problem(problem)

        def warm_start() -> Schedule:  # for the problem, or for its placement if the job may choose one
            assert file is not None
            try:
                return read_schedule(file, problem, options.placements == "all")
            except InputError as error:
                raise InputError(f"body: warm_start: {error}") from None

        deadline = began + self.settings.first_schedule_s
        offered = warm_start if file is not None else None
        initial = await self.first_schedules.find(problem, options, offered, "warm_start", deadline)
        job = NewJob(problem, options, submission.priority, key_name, idempotency_key, sha256, submission.lease_s)
        job_id, new = await self.query(lambda: self.jobs.add(job, initial, most_open=self.settings.open_jobs))
        if new:
            SUBMITTED.inc()
            INCUMBENTS.inc(initial.best.schedule is not None)
            self.worker.nudge()
            if initial.best.status == "unknown":  # the search may find one in the same time
                left_s = deadline - time.monotonic()
                with suppress(ReplyError):  # the job is stored even if too many clients follow jobs
                    async with self.job_updates.subscribe(job_id, 1) as topic:
                        await topic.until(lambda topic: topic.over or bool(topic.events), max(0.0, left_s))
            FIRST.observe(time.monotonic() - began)
        return job_id, new

    async def change_problem(self, job_id: str, problem: Problem) -> None:
        """Let the job go on with other costs, from its best schedule.

        Raises `MissingError`, `TooManyOpenError`, and `ConflictError` if it cannot.
        """
        most = self.settings.open_jobs
        for _ in range(TRIES):
            job, posed, best = await self.query(lambda: self._best_for(job_id, problem))
            deadline = time.monotonic() + self.settings.first_schedule_s
            initial = await self.first_schedules.find(posed, options_of(job), best, "carried", deadline)
            change = partial(self.jobs.change_problem, job_id, posed, initial, seen=job.last_seq, most_open=most)
            with suppress(StaleError):  # an incumbent has come in, from which the new problem would have to start
                await self.query(change)
                INCUMBENTS.inc(initial.best.schedule is not None)
                self.worker.nudge()
                return
        raise ConflictError("Better schedules come in faster than the problem can be changed; try again.")

    def _best_for(self, job_id: str, problem: Problem) -> tuple[Row[Any], Problem, ReadSchedule | None]:
        """The job, its new problem, and what reads its last schedule. Raises `ConflictError` for another structure."""
        job = self.jobs.job(job_id)
        problem = restricted(problem, options_of(job))
        if is_cancelled(job):
            raise ConflictError(CANCELLED_DETAIL)
        former = Problem.from_json(self.jobs.problem(job))
        if (structure(former), former.microbatches) != (structure(problem), problem.microbatches):
            raise ConflictError(
                "The problem has other devices, stages, micro-batches, routes or ops than the job's; submit it anew."
            )
        last = self.jobs.incumbent(job_id, job.last_seq)
        if last is None:
            return job, problem, None
        return job, problem, lambda: Programs.model_validate_json(last.programs).schedule(problem, last.method)
