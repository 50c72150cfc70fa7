"""`RemoteSearch`: searches for schedules on the service, for one problem after another. One job goes on with changed
costs. Every schedule that comes from the service is checked here."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any
from uuid import uuid4

from optpipe.errors import InputError
from optpipe.model.problem import Problem
from optpipe.options import Placements, SolveOptions
from optpipe.results import Result
from optpipe.schedule import Schedule, ScheduleFile, check
from optpipe_runtime.service.answers import IncumbentAnswer, IncumbentEvent, JobAnswer, JobState, parse
from optpipe_runtime.service.connection import LONGEST_REQUEST, ServiceConnection, run_name
from optpipe_runtime.service.errors import InvalidAnswerError, RefusedError, UnauthorizedError, UnavailableError
from optpipe_runtime.service.outages import Backoff, Outages

log = logging.getLogger("optpipe.client")

OPEN = ("queued", "running")
MOST_TIMES_STAGES = 16  # a placement that is read has at most so many times the stages of the problem


class RemoteSearch:
    """Calls `report(schedule, job, seq)` for each schedule that is better than all before it and than the one that
    runs."""

    def __init__(
        self,
        url: str,
        connection: ServiceConnection,
        options: SolveOptions,
        outages: Outages,
        report: Callable[[Schedule, str, int], None],
    ) -> None:
        self._url, self._connection = url, connection
        self._outages, self._backoff, self._report = outages, Backoff(), report
        self._options = options
        self._job: str | None = None
        self._seen = 0  # the number of the last incumbent of the job
        self._problem_version = 1  # of the job

    async def follow(self, problem: Problem, running: Schedule | None) -> None:
        """Searches until the service has ended the search for this problem, or refuses it."""
        self._problem, self._longest = problem, longest_answer(problem, self._options.placements)
        self._best, self._best_ms = running, math.inf
        self._posed = False  # whether the job has this problem
        self._submission: tuple[str, bytes] | None = None
        self._backoff.reset()
        if running is not None:
            self._compare_with(running)
        while True:
            try:
                return await self._go_on()
            except RefusedError as refusal:
                if refusal.status != 404 or self._job is None:
                    log.warning("the solver service at %s refuses this problem: %s", self._url, refusal)
                    return None
                self._job = None  # it was purged, or the service has another database
                failure: UnavailableError | InvalidAnswerError = UnavailableError("it does not know the job any more")
            except UnauthorizedError as unauthorized:
                return self._outages.begin(unauthorized)
            except (InvalidAnswerError, UnavailableError) as error:
                failure = error
            self._outages.begin(failure)
            await self._backoff.wait(failure.retry_after_s)

    def _compare_with(self, running: Schedule) -> None:
        """Schedules must be better than the running one, if that is still valid: the problem may have changed."""
        placed = running.placement.apply(self._problem) if running.placement else self._problem
        on_problem = replace(running, problem=placed)
        if not check(placed, on_problem):
            self._best_ms = self._value_ms(on_problem)

    async def _go_on(self) -> None:
        """Submits a job if there is none, then takes incumbents as they come, to the end of the search."""
        if self._job is not None and not self._posed:
            await self._pose(self._job)
        if self._job is None:
            await self._submit()
        job = self._job
        assert job is not None
        opened = time.monotonic()
        async with aclosing(self._connection.events(job, self._seen)) as events:
            async for name, data in events:
                end = parse(JobState, data) if name == "end" else None
                new = name == "incumbent" and await self._take(job, parse(IncumbentEvent, data))
                # Not at every event: a service that comes and goes would fill the log.
                if end or new or time.monotonic() - opened > self._backoff.longest:
                    self._outages.end(UnavailableError, UnauthorizedError)
                    self._backoff.reset()
                if end:
                    return self._log_end(end)
        end = parse(JobState, await self._connection.request("GET", f"/v1/jobs/{job}"))
        if end.state in OPEN:
            raise UnavailableError("it said that the job was over")
        self._outages.end(UnavailableError, UnauthorizedError)
        return self._log_end(end)

    async def _submit(self) -> None:
        """Submits a job. Until there is an answer the request keeps its idempotency key, so the service makes one job,
        however often it is sent."""
        if self._submission is None:
            request: dict[str, Any] = {
                "problem": self._content(),
                **self._options.model_dump(mode="json", exclude_none=True),
            }
            body = json.dumps(request).encode()
            if self._best is not None:
                start = ScheduleFile.from_schedule(self._best, with_ops=False).model_dump(
                    mode="json", exclude_none=True
                )
                with_start = json.dumps({**request, "warm_start": start}).encode()
                body = with_start if len(with_start) <= LONGEST_REQUEST else body
            self._submission = uuid4().hex, body
        key, body = self._submission
        job = parse(JobAnswer, await self._connection.request("POST", "/v1/jobs", body, {"Idempotency-Key": key}))
        self._job, self._seen, self._posed, self._submission = job.id, 0, True, None
        self._problem_version = job.problem_version

    def _content(self) -> dict[str, Any]:
        """The problem, whose name is the job's in the service."""
        content = self._problem.to_dict()
        return {**content, "name": content["name"] or run_name()}

    async def _pose(self, job: str) -> None:
        """Gives the job this problem; the search goes on from the best schedule that the service has. A job that cannot
        change its problem is cancelled, and another takes its place."""
        try:
            answer = await self._connection.request("POST", f"/v1/jobs/{job}/problem", {"problem": self._content()})
            self._problem_version = parse(JobAnswer, answer).problem_version
            self._posed = True
        except RefusedError as refusal:
            if refusal.status == 409:
                with suppress(UnavailableError, InvalidAnswerError, UnauthorizedError, RefusedError):
                    await self._connection.request("POST", f"/v1/jobs/{job}/cancel")
            elif refusal.status != 404:
                raise
            self._job = None

    async def _take(self, job: str, event: IncumbentEvent) -> bool:
        """Fetches an incumbent, checks it, and passes it on if it is better than all before. Returns whether there was
        a new one."""
        if event.seq <= self._seen:
            return False
        if event.problem_version is not None and event.problem_version < self._problem_version:  # for earlier costs
            self._seen = event.seq
            return False
        try:
            answer = await self._connection.request(
                "GET", f"/v1/jobs/{job}/incumbents/{event.seq}", longest=self._longest
            )
            schedule = verified(parse(IncumbentAnswer, answer), self._problem, self._options.placements)
        except InvalidAnswerError:
            self._seen = event.seq  # do not fetch it again
            raise
        self._seen = event.seq
        self._outages.end(InvalidAnswerError)
        value_ms = self._value_ms(schedule)
        if value_ms < self._best_ms:
            self._best, self._best_ms = schedule, value_ms
            self._report(schedule, job, event.seq)
        return True

    def _value_ms(self, schedule: Schedule) -> float:
        """What the search minimizes, computed here."""
        value_ms = Result.from_schedule(schedule, self._options).value_ms
        assert value_ms is not None, "a schedule has a value"
        return value_ms

    def _log_end(self, end: JobState) -> None:
        if end.state == "done":
            log.info("the solver service at %s has finished its search", self._url)
        else:
            log.warning("the solver service at %s ended its search as %s: %s", self._url, end.state, end.reason)


def verified(incumbent: IncumbentAnswer, problem: Problem, placements: Placements) -> Schedule:
    """The schedule, checked on the client's own problem. Raises `InvalidAnswerError` if it is not valid."""
    told = incumbent.schedule
    if told.placement and placements == "keep":
        raise InvalidAnswerError("a schedule for other stages than the problem's")
    try:
        placed = told.placement.apply(problem) if told.placement else problem
        programs = (device.program for device in told.devices)
        schedule = Schedule.parse(placed, programs, told.links, told.method, told.placement)
        wrong = check(placed, schedule)
    except InputError as error:
        wrong = [str(error)]
    if wrong:
        raise InvalidAnswerError(f"an invalid schedule: {wrong[0]}")
    return schedule


def longest_answer(problem: Problem, placements: Placements = "keep") -> int:
    """An upper bound on the bytes of a schedule document of this problem. Reading a longer answer could hold the
    interpreter for longer than a step may wait."""
    if placements == "all":
        return MOST_TIMES_STAGES * longest_answer(problem)
    ops = problem.microbatches * sum(12 + 2 * stage.offload_parts for stage in problem.stages)
    return 2**14 + 2 * len(json.dumps(problem.to_dict())) + 2 * 16 * ops  # in programs, and again in links' orders
