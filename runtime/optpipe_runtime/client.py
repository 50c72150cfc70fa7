"""`ScheduleClient`: asks the solver service for schedules while the training runs, and never makes a step wait.

client = ScheduleClient("http://127.0.0.1:8000", problem)  # on one rank; the ranks agree among themselves
if offer := client.poll():  # between two iterations; microseconds
    swap(offer.schedule)
client.update(measured, running)  # the costs have changed: the search goes on with them, from the schedule that runs

All waiting is done by one daemon thread. Every schedule is checked here before it is offered: the service may be wrong. Where it is
away, slow or wrong, there is nothing to poll, the log has one warning an outage, and the training goes on with the schedule it has.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import queue
import random
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Any, TypeVar

import httpx
from pydantic import BaseModel, Field, ValidationError

from optpipe.child import Objective
from optpipe.errors import InputError, input_error
from optpipe.files import ScheduleFile
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.validity import check

log = logging.getLogger("optpipe.client")

LONGEST_REQUEST = 2**20  # bytes that the service takes
LONGEST_REPLY = 2**26  # bytes
LONGEST_EVENT = 2**20
CLOSE_S = 5.0  # a close waits no longer for the thread; it is a daemon


@dataclass(frozen=True)
class Offer:
    """A schedule better than those before it, checked on this client's problem."""

    version: int  # 1, 2, ... of this client
    schedule: Schedule
    job: str  # where it is from: the service's job and the number in it
    seq: int

    @property
    def makespan_ms(self) -> float:
        """What the iteration should take."""
        return self.schedule.makespan_ms


Model = TypeVar("Model", bound=BaseModel)


class _Job(BaseModel):
    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]  # goes into addresses


class _End(BaseModel):
    state: str
    reason: str | None = None


class _Event(BaseModel):
    seq: Annotated[int, Field(ge=1, le=2**53)]


class _Incumbent(_Event):
    schedule: ScheduleFile


class _AwayError(Exception):
    """The service does not answer, or not now."""


class _WrongError(Exception):
    """The service answers what makes no sense."""


class _RefusedError(Exception):
    """The service will never answer this."""


class ScheduleClient:
    """Follows one problem on the service at `url`.

    `warm_start` is the schedule that the training runs now: the search starts there, and only what is better is offered. Times are
    seconds; after a failure the next try waits from `backoff_s[0]`, doubled each time, up to `backoff_s[1]`. Raises `InputError` for
    a url that is none; everything else that can go wrong later is the log's.
    """

    def __init__(
        self,
        url: str,
        problem: Problem,
        *,
        method: str = "auto",
        objective: Objective = "makespan",
        time_limit_s: float = 600.0,
        warm_start: Schedule | None = None,
        connect_timeout_s: float = 2.0,
        read_timeout_s: float = 45.0,
        backoff_s: tuple[float, float] = (0.5, 30.0),
    ) -> None:
        self._url, self._objective = base_url(url), objective
        self._request = {"method": method, "objective": objective, "time_limit_s": time_limit_s}
        self._timeout = httpx.Timeout(read_timeout_s, connect=connect_timeout_s)
        self._reply_s = connect_timeout_s + read_timeout_s
        self._backoff_s = backoff_s
        self._job: str | None = None
        self._seen = 0  # the last incumbent of the job
        self._version = 0
        self._failures = 0  # since the service last was of use
        self._outages: set[str] = set()
        self._newest: deque[Offer] = deque(maxlen=1)
        self._asked = self._searched = 0  # problems: how many the caller has given, how many searches are over
        self._waiting: queue.SimpleQueue[tuple[Problem, Schedule | None] | None] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self.update(problem, warm_start)
        self._thread = threading.Thread(target=self._run, name="optpipe-client", daemon=True)
        self._thread.start()

    def poll(self) -> Offer | None:
        """The newest better schedule for the problem as it is now, once; None where there is none. Never blocks."""
        try:
            offer = self._newest.popleft()
        except IndexError:
            return None
        return offer if offer.schedule.problem is self._current else None

    def update(self, problem: Problem, warm_start: Schedule | None) -> None:
        """From now on another problem counts, such as the same with other times; the search starts at `warm_start`. Never blocks."""
        self._current = problem
        self._asked += 1
        self._waiting.put((problem, warm_start))
        self._interrupt(self._asked)

    @property
    def ended(self) -> bool:
        """Whether the search is over: what has not been polled by now is the last offer."""
        return self._searched == self._asked

    def close(self) -> None:
        """Stops following; the job on the service goes on to its own end."""
        self._waiting.put(None)
        self._interrupt(self._asked + 1)
        self._thread.join(CLOSE_S)

    def _interrupt(self, number: int) -> None:
        """Ends the search for the problems before this one."""

        def cancel() -> None:
            if self._task is not None and self._searched < number - 1:
                self._task.cancel()

        with suppress(RuntimeError):  # the thread has ended by itself
            self._loop.call_soon_threadsafe(cancel)

    def __enter__(self) -> ScheduleClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            while (asked := self._waiting.get()) is not None:
                try:
                    runner.run(self._main(*asked))
                except asyncio.CancelledError:
                    pass  # another problem waits, or the end
                except Exception:
                    log.exception("the client of the solver service failed; training goes on with the schedule it has")
                self._searched += 1

    async def _main(self, problem: Problem, running: Schedule | None) -> None:
        self._task = asyncio.current_task()
        if not self._waiting.empty():
            return  # a newer problem, or the end
        self._problem, self._best, self._best_ms = problem, running, math.inf
        old = self._job
        self._forget_job()
        self._failures = 0
        if running is not None:
            self._judge_warm_start(running)
        async with httpx.AsyncClient(timeout=self._timeout, trust_env=False, headers={"Accept-Encoding": "identity"}) as http:
            if old is not None:  # nobody waits for it any more
                with suppress(httpx.HTTPError):
                    await http.post(f"{self._url}/v1/jobs/{old}/cancel")
            while True:
                try:
                    if await self._follow(http):
                        return
                except _RefusedError as refusal:
                    log.warning("the solver service at %s refuses this problem: %s", self._url, refusal)
                    return
                except _WrongError as wrong:
                    self._warn("wrong", str(wrong))
                except (_AwayError, httpx.HTTPError, TimeoutError) as error:
                    self._warn("away", str(error) or type(error).__name__)
                first, longest = self._backoff_s
                delay = min(longest, first * 2 ** min(self._failures, 30))
                self._failures += 1
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))

    def _judge_warm_start(self, running: Schedule) -> None:
        """What runs now sets the mark, if it fits the problem as it is now."""
        here = Schedule(self._problem, running.programs, running.links, running.method)
        if not check(self._problem, here):
            self._best_ms = self._value(here)

    async def _follow(self, http: httpx.AsyncClient) -> bool:
        """Submits where there is no job, then takes incumbents as they come. True when the search is over."""
        if self._job is None:
            await self._submit(http)
        address = f"{self._url}/v1/jobs/{self._job}/events"
        async with http.stream("GET", address, headers={"Last-Event-ID": str(self._seen)}) as response:
            if response.status_code == 404:
                self._forget_job()
                raise _AwayError("it does not know the job any more")
            _require(response.status_code, 200)
            opened = time.monotonic()
            async for name, data in _events(response):
                good = name == "incumbent" and await self._take(http, _parsed(_Event, data).seq)
                over = name == "end" and self._over(_parsed(_End, data))
                if good or over or time.monotonic() - opened > self._backoff_s[1]:  # else one that comes and goes would fill the log
                    self._recovered("away")
                    self._failures = 0
                if over:
                    return True
        raise _AwayError("the stream of events ended before the job")

    async def _submit(self, http: httpx.AsyncClient) -> None:
        request: dict[str, Any] = {"problem": self._problem.to_dict(), **self._request}
        body = json.dumps(request)
        if self._best is not None:
            start = ScheduleFile.of(self._best).model_dump(mode="json", exclude_none=True, exclude={"ops"})
            with_start = json.dumps({**request, "warm_start": start})
            body = with_start if len(with_start) <= LONGEST_REQUEST else body
        headers = {"Content-Type": "application/json"}
        async with asyncio.timeout(self._reply_s), http.stream("POST", f"{self._url}/v1/jobs", content=body, headers=headers) as response:
            reply = await _body(response)
        if 400 <= response.status_code < 500 and response.status_code not in (408, 429):
            raise _RefusedError(_detail(reply))
        _require(response.status_code, 201)
        self._job, self._seen = _parsed(_Job, reply).id, 0

    async def _take(self, http: httpx.AsyncClient, seq: int) -> bool:
        """Fetches an incumbent, checks it, and offers it if it is better than all before. Whether it was valid."""
        async with asyncio.timeout(self._reply_s), http.stream("GET", f"{self._url}/v1/jobs/{self._job}/incumbents/{seq}") as response:
            reply = await _body(response)
        _require(response.status_code, 200)
        self._seen = seq
        try:
            schedule = self._verified(_parsed(_Incumbent, reply))
        except _WrongError as wrong:
            self._warn("wrong", str(wrong))
            return False
        self._recovered("wrong")
        if self._value(schedule) < self._best_ms:
            self._best, self._best_ms = schedule, self._value(schedule)
            self._version += 1
            assert self._job is not None
            self._newest.append(Offer(self._version, schedule, self._job, seq))
        return True

    def _verified(self, incumbent: _Incumbent) -> Schedule:
        file = incumbent.schedule
        try:
            schedule = Schedule.parse(self._problem, (device.program for device in file.devices), file.links, file.method)
            wrong = check(self._problem, schedule)
        except InputError as error:
            wrong = [str(error)]
        if wrong:
            raise _WrongError(f"a schedule that is not valid: {wrong[0]}")
        return schedule

    def _value(self, schedule: Schedule) -> float:
        return schedule.makespan_ms if self._objective == "makespan" else schedule.span_ms

    def _over(self, end: _End) -> bool:
        if end.state == "stopped":  # the service was restarted and has let the job go
            self._forget_job()
            raise _AwayError("the job was stopped")
        if end.state == "done":
            log.info("the solver service at %s has finished its search", self._url)
        else:
            log.warning("the solver service at %s ended its search as %s: %s", self._url, end.state, end.reason)
        return True

    def _forget_job(self) -> None:
        self._job, self._seen = None, 0

    def _warn(self, outage: str, why: str) -> None:
        """Once an outage; `_recovered` ends it."""
        if outage not in self._outages:
            self._outages.add(outage)
            what = "is away" if outage == "away" else "is wrong"
            log.warning("the solver service at %s %s: %s; training goes on with the schedule it has", self._url, what, why[:300])

    def _recovered(self, outage: str) -> None:
        if outage in self._outages:
            self._outages.remove(outage)
            log.info("the solver service at %s is %s again", self._url, "there" if outage == "away" else "right")


def base_url(url: str) -> str:
    """The address of a service, without a slash at its end; `InputError` for what is none."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        parts = httpx.URL("")
    if parts.scheme not in ("http", "https") or not parts.host:
        raise InputError(f"url = {url[:100]!r}: must be http://HOST:PORT")
    return url.rstrip("/")


def _parsed(model: type[Model], text: str | bytes) -> Model:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise _WrongError(str(input_error(error, "its answer"))) from None


def _require(status: int, wanted: int) -> None:
    if status >= 500 or status in (408, 429):
        raise _AwayError(f"HTTP status {status}")
    if status != wanted:
        raise _WrongError(f"HTTP status {status}")


def _detail(reply: bytes) -> str:
    """The sentence of a problem document (RFC 9457)."""
    with suppress(ValueError, TypeError, KeyError):
        return str(json.loads(reply)["detail"])[:300]
    return "it does not say why"


async def _body(response: httpx.Response) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > LONGEST_REPLY:
            raise _WrongError(f"an answer longer than {LONGEST_REPLY} bytes")
    return bytes(body)


async def _events(response: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    """Server-sent events as (name, data); a comment, the sign of life, has the name ""."""
    rest = b""
    name, data = "", ""
    async for chunk in response.aiter_raw():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            field, _, value = line.decode(errors="replace").rstrip("\r").partition(":")
            if field == "event":
                name = value.strip()
            elif field == "data":
                data += value
            elif not field:
                yield name, data
                name, data = "", ""
        if len(rest) + len(data) > LONGEST_EVENT:
            raise _WrongError(f"an event longer than {LONGEST_EVENT} bytes")
