"""`Search`: one problem after another on the service, by one job that goes on with changed costs; every schedule is
checked here."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Any
from uuid import uuid4

from optpipe.errors import InputError
from optpipe.evaluate.objective import Objective
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, ScheduleFile, check
from optpipe_runtime.service.wire import (
    LONGEST_REQUEST,
    AwayError,
    Backoff,
    ClosedError,
    DeniedError,
    Incumbent,
    Job,
    News,
    Outages,
    State,
    Wire,
    WrongError,
    parsed,
)

log = logging.getLogger("optpipe.client")

OPEN = ("queued", "running")


class Search:
    """Calls `found(schedule, job, seq)` for each schedule that is better than all before it, and than the one that
    runs."""

    def __init__(
        self,
        url: str,
        wire: Wire,
        request: dict[str, Any],
        objective: Objective,
        outages: Outages,
        backoff: Backoff,
        found: Callable[[Schedule, str, int], None],
    ) -> None:
        self._url, self._wire, self._outages, self._backoff, self._found = url, wire, outages, backoff, found
        self._request, self._objective = {**request, "objective": objective}, objective
        self._job: str | None = None
        self._seen = 0  # the last incumbent of the job
        self._problem_version = 1  # of the job

    async def follow(self, problem: Problem, running: Schedule | None) -> None:
        """Until the search for this problem is over, or the service will have nothing of it."""
        self._problem, self._longest = problem, longest_answer(problem)
        self._best, self._best_ms = running, math.inf
        self._posed = False  # the job is about this problem
        self._submission: tuple[str, bytes] | None = None
        self._backoff.forget()
        if running is not None:
            self._judge_warm_start(running)
        while True:
            wait_s = 0.0
            try:
                return await self._go_on()
            except DeniedError as denial:
                if denial.status != 404 or self._job is None:
                    log.warning("the solver service at %s refuses this problem: %s", self._url, denial)
                    return None
                self._job = None  # it has been purged, or is another database's
                self._outages.begin("away", "it does not know the job any more")
            except ClosedError as closed:
                self._outages.begin("closed", closed)
                return None
            except WrongError as wrong:
                self._outages.begin("wrong", wrong)
            except AwayError as away:
                self._outages.begin("away", away)
                wait_s = away.retry_after_s
            await self._backoff.wait(wait_s)

    def _judge_warm_start(self, running: Schedule) -> None:
        """What runs now sets the mark, if it fits the problem as it is now."""
        here = Schedule(self._problem, running.programs, running.links, running.method)
        if not check(self._problem, here):
            self._best_ms = self._value(here)

    async def _go_on(self) -> None:
        """Submits where there is no job, then takes incumbents as they come, to the end of the search."""
        if self._job is not None and not self._posed:
            await self._pose(self._job)
        if self._job is None:
            await self._submit()
        job = self._job
        assert job is not None
        opened = time.monotonic()
        async with aclosing(self._wire.events(job, self._seen)) as events:
            async for name, data in events:
                end = parsed(State, data) if name == "end" else None
                new = name == "incumbent" and await self._take(job, parsed(News, data))
                if (
                    end or new or time.monotonic() - opened > self._backoff.longest
                ):  # else one that comes and goes would fill the log
                    self._outages.end("away", "closed")
                    self._backoff.forget()
                if end:
                    return self._tell_end(end)
        end = parsed(State, await self._wire.ask("GET", f"/v1/jobs/{job}"))
        if end.state in OPEN:
            raise AwayError("it said that the job was over")
        self._outages.end("away", "closed")
        return self._tell_end(end)

    async def _submit(self) -> None:
        """Until there is an answer it is one submission, however often it is sent: the service knows it by its key."""
        if self._submission is None:
            request: dict[str, Any] = {"problem": self._problem.to_dict(), **self._request}
            body = json.dumps(request).encode()
            if self._best is not None:
                start = ScheduleFile.of(self._best).model_dump(mode="json", exclude_none=True, exclude={"ops"})
                with_start = json.dumps({**request, "warm_start": start}).encode()
                body = with_start if len(with_start) <= LONGEST_REQUEST else body
            self._submission = uuid4().hex, body
        key, body = self._submission
        job = parsed(Job, await self._wire.ask("POST", "/v1/jobs", body, {"Idempotency-Key": key}))
        self._job, self._seen, self._posed, self._submission = job.id, 0, True, None
        self._problem_version = job.problem_version

    async def _pose(self, job: str) -> None:
        """The job goes on with this problem, from the best that the service has. One that cannot is left to another."""
        try:
            answer = await self._wire.ask("POST", f"/v1/jobs/{job}/problem", {"problem": self._problem.to_dict()})
            self._problem_version = parsed(Job, answer).problem_version
            self._posed = True
        except DeniedError as denial:
            if denial.status == 409:
                with suppress(AwayError, WrongError, ClosedError, DeniedError):
                    await self._wire.ask("POST", f"/v1/jobs/{job}/cancel")
            elif denial.status != 404:
                raise
            self._job = None

    async def _take(self, job: str, news: News) -> bool:
        """Fetches an incumbent, checks it, and passes it on if it is better than all before. Whether there was a new
        one."""
        if news.seq <= self._seen:
            return False
        if (
            news.problem_version is not None and news.problem_version < self._problem_version
        ):  # found for the costs before
            self._seen = news.seq
            return False
        try:
            answer = await self._wire.ask("GET", f"/v1/jobs/{job}/incumbents/{news.seq}", longest=self._longest)
            schedule = self._verified(parsed(Incumbent, answer))
        except WrongError:
            self._seen = news.seq  # once is enough
            raise
        self._seen = news.seq
        self._outages.end("wrong")
        if self._value(schedule) < self._best_ms:
            self._best, self._best_ms = schedule, self._value(schedule)
            self._found(schedule, job, news.seq)
        return True

    def _verified(self, incumbent: Incumbent) -> Schedule:
        told = incumbent.schedule
        try:
            schedule = Schedule.parse(
                self._problem, (device.program for device in told.devices), told.links, told.method
            )
            wrong = check(self._problem, schedule)
        except InputError as error:
            wrong = [str(error)]
        if wrong:
            raise WrongError(f"a schedule that is not valid: {wrong[0]}")
        return schedule

    def _value(self, schedule: Schedule) -> float:
        return schedule.makespan_ms if self._objective == "makespan" else schedule.span_ms

    def _tell_end(self, end: State) -> None:
        if end.state == "done":
            log.info("the solver service at %s has finished its search", self._url)
        else:
            log.warning("the solver service at %s ended its search as %s: %s", self._url, end.state, end.reason)


def longest_answer(problem: Problem) -> int:
    """No schedule of this problem, written as a document, has more bytes. To read one longer than that would hold the
    interpreter for longer than a step may wait."""
    ops = problem.microbatches * sum(12 + 2 * stage.offload_parts for stage in problem.stages)
    return 2**14 + 2 * len(json.dumps(problem.to_dict())) + 2 * 16 * ops  # in programs, and again in links' orders
