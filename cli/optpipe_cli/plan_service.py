"""The searches of `optpipe plan` as jobs of a service: its workers share them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from optpipe.errors import InputError, OptPipeError
from optpipe.model.problem import Problem
from optpipe.results import Result, merged
from optpipe.schedule import Schedule, ScheduleFile
from optpipe_runtime.service.answers import IncumbentAnswer, JobAnswer, JobState, parse
from optpipe_runtime.service.connection import KEY_VARIABLE, LONGEST_REQUEST, ServiceConnection, api_key, base_url
from optpipe_runtime.service.errors import InvalidAnswerError, RefusedError, UnauthorizedError, UnavailableError
from optpipe_runtime.service.outages import Backoff
from optpipe_runtime.service.remote_search import OPEN, longest_answer, verified

if TYPE_CHECKING:
    from optpipe.options import SearchOptions

JOBS = 8  # that wait or run at a time; the service limits submissions of a tenant, too
WAIT_S = 1.0  # for a job, in one request
QUEUED = 1.0  # of a job's own time, that it may wait for a worker
ANSWERED_S = 5.0  # for submissions and answers beyond that
TIMES_S = (2.0, 45.0)  # for a connection, and for an answer
BACKOFF_S = (0.5, 10.0)  # before a request is sent again


class _Job(JobState):
    """A job, as the service tells it. Its bound is not read: only what is proven here rules a candidate out."""

    best: IncumbentAnswer | None = None


class Jobs:
    """Searches problems as jobs of a service.

    Raises
    ------
    InputError
        If no service answers at the address, or it does not accept the key in OPTPIPE_KEY.
    """

    def __init__(self, url: str, options: SearchOptions) -> None:
        self._options, self._cancelled = options, threading.Event()
        self._address, self._key = base_url(url, "service"), api_key(None)
        asyncio.run(self._require_service())

    def __call__(self, problem: Problem, start: Schedule | None, seconds: float) -> Result | None:
        """Search for so many seconds of a worker. Raises OptPipeError if the service does not take the problem."""
        return asyncio.run(self._searched(problem, start, seconds))

    def cancel(self) -> None:
        """End all jobs; each gives its best so far."""
        self._cancelled.set()

    def _connection(self) -> ServiceConnection:
        return ServiceConnection(self._address, self._key, *TIMES_S)

    async def _require_service(self) -> None:
        try:
            async with self._connection() as connection:
                await connection.request("GET", "/v1/queue")
        except UnauthorizedError:
            wrong = "does not accept the key in" if self._key else "requires an API key, in"
            raise InputError(f"service = {self._address}: it {wrong} {KEY_VARIABLE} of the environment") from None
        except UnavailableError as error:
            raise InputError(f"service = {self._address}: nobody answers there: {error}") from None
        except (InvalidAnswerError, RefusedError) as error:
            raise InputError(f"service = {self._address}: no solver service answers there: {error}") from None

    async def _searched(self, problem: Problem, start: Schedule | None, seconds: float) -> Result | None:
        options = self._options.model_copy(update={"time_limit_s": seconds, "threads": 1})
        from_start = Result.from_schedule(start, options) if start else Result("unknown")
        until = time.monotonic() + (1 + QUEUED) * seconds + ANSWERED_S
        try:
            async with self._connection() as connection:
                job = await self._job(connection, self._submission(problem, start, options), problem, until)
                if job and job.best:
                    schedule = verified(job.best, problem, options.placements)
                    return merged(from_start, Result.from_schedule(schedule, options))
        except (InvalidAnswerError, RefusedError, UnauthorizedError, UnavailableError) as error:
            raise OptPipeError(f"the service at {self._address} gives no answer to a search: {error}") from None
        return from_start

    def _submission(self, problem: Problem, start: Schedule | None, options: SearchOptions) -> bytes:
        """A job's body, with the schedule to start from unless that makes it too long."""
        asked: dict[str, Any] = {"problem": problem.to_dict(), **options.model_dump(mode="json", exclude_none=True)}
        if start is None:
            return json.dumps(asked).encode()
        warm = ScheduleFile.from_schedule(start, with_ops=False).model_dump(mode="json", exclude_none=True)
        body = json.dumps({**asked, "warm_start": warm}).encode()
        return body if len(body) <= LONGEST_REQUEST else json.dumps(asked).encode()

    async def _job(self, connection: ServiceConnection, body: bytes, problem: Problem, until: float) -> _Job | None:
        """Submit a job and wait until it is over; None if it was not by then. What is open at the end is cancelled."""
        backoff, unique = Backoff(*BACKOFF_S), {"Idempotency-Key": uuid4().hex}
        longest = longest_answer(problem, self._options.placements)
        name: str | None = None
        job: _Job | None = None
        while job is None or job.state in OPEN:
            if time.monotonic() > until or self._cancelled.is_set():
                if name is not None:
                    await connection.request("POST", f"/v1/jobs/{name}/cancel", longest=longest)
                break
            try:
                if name is None:
                    name = parse(JobAnswer, await connection.request("POST", "/v1/jobs", body, unique, longest)).id
                answer = await connection.request("GET", f"/v1/jobs/{name}?wait={WAIT_S:g}", longest=longest)
            except UnavailableError as unavailable:  # it may be there again before time is up
                if time.monotonic() + unavailable.retry_after_s > until:
                    raise
                await backoff.wait(unavailable.retry_after_s)
                continue
            backoff.reset()
            job = parse(_Job, answer)
        return job
