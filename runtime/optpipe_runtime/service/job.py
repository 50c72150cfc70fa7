"""`ServiceJob`: one job of a service, for a training's client and for `optpipe solve --url`. No answer is trusted: only
the models here read it."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Annotated, Any, TypeVar
from uuid import uuid4

from httpx import AsyncClient
from pydantic import AfterValidator, BaseModel, FailFast, Field, ValidationError
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_never, wait_exponential

from optpipe.errors import InputError, input_error
from optpipe.formats.stacks import STACKS
from optpipe.model.placement import Placement
from optpipe.model.problem import Problem
from optpipe.options import Placements, SolveOptions
from optpipe.results import GONE
from optpipe.schedule import Schedule, ScheduleFile
from optpipe.text import printable
from optpipe_runtime.service import requests
from optpipe_runtime.service.requests import RefusedError, ServiceError, UnavailableError, request

log = logging.getLogger("optpipe.client")

FIRST_S, LONGEST_S = 0.5, 30.0  # waits after a failure, doubled each time
MOST_TIMES_STAGES = 16  # a placement that is read has at most so many times the stages of the problem


class ServiceJob:
    """A job that is submitted once, however often its requests fail, and followed from where it was. Every schedule is
    checked here, because the service may be wrong.

    Its methods raise a `ServiceError` if the service is away, slow or wrong; called again, they go on.
    """

    def __init__(
        self, http: AsyncClient, problem: Problem, options: SolveOptions, lease_s: float | None = None
    ) -> None:
        self._http, self._options, self._lease_s = http, options, lease_s
        self.id: str | None = None
        self.end = JobState(state="queued")  # how it has ended, after all of `schedules`
        self._seen, self._problem_version = 0, 1  # of its last incumbent, and of its problem
        self.change(problem)

    def change(self, problem: Problem) -> None:
        """Changes the problem, from the next `pose` on."""
        self._problem, self._longest = problem, longest_answer(problem, self._options.placements_of(problem))
        self._posed = False  # whether the job has it
        self._submission: tuple[str, bytes] | None = None  # key and body, until it is answered

    async def pose(self, start: Schedule | None) -> bool:
        """Poses the problem to the job, which goes on from its best schedule, or submits another job, which begins with
        `start`. Returns whether it did the latter."""
        if self.id is not None and not self._posed:
            await self._pose(f"/v1/jobs/{self.id}")
        if self.id is not None:
            return False
        if self._submission is None:
            self._submission = uuid4().hex, self._body(start)
        await self._submit(*self._submission)
        return True

    async def _pose(self, job: str) -> None:
        """A job that cannot change its problem is cancelled, and another takes its place."""
        try:
            self._answered(await self._request("POST", f"{job}/problem", {"problem": self._named_problem()}))
        except RefusedError as refusal:
            if refusal.status == 409:
                with suppress(ServiceError):
                    await self.cancel()
            elif refusal.status != 404:
                raise
            self.id = None

    def _body(self, start: Schedule | None) -> bytes:
        content = {"problem": self._named_problem(), **self._options.model_dump(mode="json", exclude_none=True)}
        if self._lease_s is not None:
            content["lease_s"] = self._lease_s
        body = json.dumps(content).encode()
        if start is None:
            return body
        file = ScheduleFile.from_schedule(start, with_ops=False)
        content["warm_start"] = file.model_dump(mode="json", exclude_none=True)
        if len(with_start := json.dumps(content).encode()) <= requests.LONGEST_REQUEST:
            return with_start
        log.warning("the search begins without a schedule: with it the request is longer than a service takes")
        return body

    async def _submit(self, key: str, body: bytes) -> None:
        """Until there is an answer the request keeps its idempotency key: the service makes one job of it."""
        self._answered(await self._request("POST", "/v1/jobs", body, {"Idempotency-Key": key}))
        self._seen, self._submission = 0, None

    def _answered(self, answer: bytes) -> None:
        job = parse(JobAnswer, answer)
        self.id, self._problem_version, self._posed = job.id, job.problem_version, True

    async def _request(self, method: str, path: str, content: Any = None, headers: Any = None) -> bytes:
        """Its answer may have a schedule."""
        return await request(self._http, method, path, content, headers, requests.LONGEST_ANSWER + self._longest)

    def _named_problem(self) -> dict[str, Any]:
        """The problem, whose name is the job's in the service."""
        return {**self._problem.to_dict(), "name": self._problem.name or requests.run_name()}

    async def schedules(self) -> AsyncGenerator[tuple[int, Schedule], None]:
        """Yields the job's schedules for this problem as they come, each once, with its number; ends with the job."""
        path = f"/v1/jobs/{self.id}"
        try:
            async with aclosing(requests.events(self._http, path, self._seen)) as stream:
                async for event in stream:
                    if event.event == "end":
                        self.end = parse(JobState, event.data)
                        break
                    if event.event == "incumbent":
                        found = parse(IncumbentEvent, event.data)
                        if schedule := await self._fetched(path, found):
                            yield found.seq, schedule
                else:
                    self.end = parse(JobState, await self._request("GET", path))
        except RefusedError as refusal:
            if refusal.status != 404:
                raise
            self.id = None  # it was purged, or the service has another database
            raise UnavailableError("it does not know the job any more") from None
        if self.end.state in ("queued", "running"):
            raise UnavailableError("it said that the job was over")
        if (self.end.state, self.end.reason) == ("cancelled", GONE):  # it could not be reached, or its clock has jumped
            self.id = None
            raise UnavailableError(f"it has cancelled the job: {GONE}")

    async def _fetched(self, path: str, found: IncumbentEvent) -> Schedule | None:
        """None for one that was fetched before, or is for earlier costs."""
        before, self._seen = self._seen, max(self._seen, found.seq)
        if found.seq <= before or (found.problem_version or self._problem_version) < self._problem_version:
            return None
        try:
            answer = await request(self._http, "GET", f"{path}/incumbents/{found.seq}", longest=self._longest)
        except UnavailableError:
            self._seen = before  # it is fetched again
            raise
        return verified(answer, self._problem, self._options)

    async def renew(self) -> None:
        """Renews the job's lease again and again, until this is cancelled."""
        while self._lease_s:
            await asyncio.sleep(self._lease_s / 4)
            with suppress(ServiceError, TimeoutError):
                async with asyncio.timeout(self._lease_s / 4):  # else one without an answer would take all of the lease
                    if self.id is not None:
                        await request(self._http, "PUT", f"/v1/jobs/{self.id}/lease")

    async def cancel(self) -> None:
        """Ends the search. A submission without an answer is sent again: the service may have the job."""
        if self.id is None and self._submission is not None:
            await self._submit(*self._submission)
        if self.id is not None:
            await self._request("POST", f"/v1/jobs/{self.id}/cancel")


def retrying(*kinds: type[ServiceError], failed: Any = lambda error: None, stop: Any = stop_never) -> AsyncRetrying:
    """Attempts until one succeeds, fails in another way, or is the last; `failed` gets each error before the wait."""
    return AsyncRetrying(
        retry=retry_if_exception_type(kinds),
        wait=wait_s,
        stop=stop,
        before_sleep=lambda state: failed(state.outcome and state.outcome.exception()),
        reraise=True,
    )


def wait_s(state: RetryCallState) -> float:
    """The wait before the next attempt. It is never shorter than the service asks for, and has jitter, so that clients
    that were sent away together come back one by one."""
    error = state.outcome and state.outcome.exception()
    asked_s = error.retry_after_s if isinstance(error, ServiceError) else 0.0
    delay_s = wait_exponential(multiplier=FIRST_S, max=LONGEST_S)(state) * random.uniform(0.5, 1.0)
    return max(delay_s, asked_s * random.uniform(1.0, 1.2))


# A text of the service for people: one line, of which the beginning is kept.
Line = Annotated[str, AfterValidator(lambda text: printable(text, requests.LONGEST_REASON))]


class JobAnswer(BaseModel):
    """A job that has just been given a problem."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]  # becomes part of addresses
    problem_version: int = 1


class JobState(BaseModel):
    """The state of a job; also its last event. Texts as the service has them, whatever is in them."""

    state: str
    reason: str | None = None
    lower_bound_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class IncumbentEvent(BaseModel):
    """A new incumbent: its number in the job, and the version of the problem that it was found for."""

    seq: Annotated[int, Field(ge=1, le=2**53)]
    problem_version: int | None = None


class _Device(BaseModel):
    program: Annotated[list[str], FailFast()]


class _Programs(BaseModel):
    """The programs of a schedule document. Its times and costs are not read: the client computes its own."""

    devices: Annotated[list[_Device], FailFast()]
    links: dict[str, Annotated[list[str], FailFast()]] | None = None
    method: Line = ""
    placement: Placement | None = None  # where the search may choose the stages


class IncumbentAnswer(BaseModel):
    schedule: _Programs


Model = TypeVar("Model", bound=BaseModel)


def parse(model: type[Model], text: str | bytes) -> Model:
    """Raises `InvalidAnswerError` if the text is not of this model."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise requests.InvalidAnswerError(str(input_error(error, "its answer"))) from None


def verified(text: bytes, problem: Problem, options: SolveOptions) -> Schedule:
    """An incumbent's schedule, checked on the client's problem as the stack runs it. Raises `InvalidAnswerError` if it
    is invalid."""
    found, stack = parse(IncumbentAnswer, text).schedule, STACKS[options.stack]
    if found.placement and options.placements_of(problem) == "keep":
        raise requests.InvalidAnswerError("a schedule for other stages than the problem's")
    try:
        posed = stack.restrict(problem)
        placed = found.placement.apply(posed) if found.placement else posed
        programs = (device.program for device in found.devices)
        schedule = Schedule.parse(placed, programs, found.links, found.method, found.placement)
        wrong = stack.first_fault(schedule)
    except InputError as error:
        wrong = str(error)
    if wrong:
        raise requests.InvalidAnswerError(f"an invalid schedule: {wrong}")
    return schedule


def longest_answer(problem: Problem, placements: Placements = "keep") -> int:
    """An upper bound on the bytes of a schedule document of this problem. Reading a longer answer could hold the
    interpreter for longer than a step may wait."""
    ops = problem.microbatches * sum(12 + 2 * stage.offload_parts for stage in problem.stages)
    longest = 2**14 + 2 * len(json.dumps(problem.to_dict())) + 2 * 16 * ops  # in programs, and again in links' orders
    return longest * (MOST_TIMES_STAGES if placements == "all" else 1)
