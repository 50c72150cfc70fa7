"""`ScheduleClient`: asks for schedules while the training runs, and never makes a step wait.

    client = ScheduleClient("http://127.0.0.1:8000", problem)  # on one rank; the ranks agree among themselves
    if offer := client.poll():  # between two iterations; takes microseconds
        swap(offer.schedule)
        client.adopted(offer, step)  # and again with the time of an iteration, once it is measured
    client.update(measured, running)  # the costs have changed: the search goes on with them

One daemon thread does all waiting. Every schedule is checked here before it is offered, because the service may be
wrong. If the service is away, slow or wrong, there is nothing to poll, the log has one warning for the outage, and the
training goes on with the schedule it has.

Without a service the search runs on this host, and begins with what a cache has:

    client = ScheduleClient(None, problem, cache=optpipe_cache.Cache(path))
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import threading
import time
from collections import deque
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Unpack
from uuid import uuid4

from pydantic import BeforeValidator
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from optpipe.anytime import ScheduleCache, improve
from optpipe.errors import OptPipeError
from optpipe.evaluate.objective import NO_SCHEDULE_MS
from optpipe.model.problem import Problem
from optpipe.options import PlacementsOption, SolveArguments, SolveOptions, TimeLimit
from optpipe.process.background import NICER
from optpipe.results import Result
from optpipe.schedule import Schedule, ScheduleFile, check
from optpipe_runtime.service.requests import (
    LONGEST_REQUEST,
    IncumbentEvent,
    InvalidAnswerError,
    JobAnswer,
    JobState,
    RefusedError,
    ServiceError,
    UnauthorizedError,
    UnavailableError,
    api_key,
    events,
    http_client,
    longest_answer,
    parse,
    request,
    run_name,
    service_url,
    verified,
)

log = logging.getLogger("optpipe.client")

FIRST_S, LONGEST_S = 0.5, 30.0  # waits after a failure, doubled each time
REPORT_S = 3.0  # how long `close` waits until the service has the last adoptions, and has ended the search
CLOSE_S = 6.0  # how long `close` waits for the thread, which is a daemon
HERE = "here"  # the job of a search on this host
OUTAGES: dict[type[ServiceError], tuple[str, str]] = {  # what the log says when one begins, and when it is over
    UnavailableError: ("is unavailable", "is available again"),
    InvalidAnswerError: ("gives wrong answers", "gives right answers again"),
    UnauthorizedError: ("refuses this client", "accepts this client again"),
}


class ClientOptions(SolveOptions):
    """What a client asks of its searches, which run beside a training."""

    time_limit_s: TimeLimit = 600.0
    placements: Annotated[PlacementsOption, BeforeValidator(lambda choice: choice or "keep")] = "keep"


@dataclass(frozen=True)
class Offer:
    """A schedule better than those before it, checked on this client's problem."""

    version: int  # 1, 2, ... of this client
    schedule: Schedule
    job: str  # of the service
    seq: int  # the number of the incumbent in this job

    @property
    def makespan_ms(self) -> float:
        """The predicted time of an iteration."""
        return self.schedule.makespan_ms


class ScheduleClient:
    """Follows one problem, on a service or on this host. Raises `InputError` if the url or the key cannot be one, or an
    option is unknown or out of range. Whatever goes wrong later is logged.

    Parameters
    ----------
    url
        The address of the service; None: OPTPIPE_URL of the environment. Without that, or with a cache, the search runs
        on this host.
    problem
        What to find schedules for. Without a name, its job is called by what started the training, such as
        `slurm-4711` (SLURM_JOB_ID) or `torchrun-a7` (TORCHELASTIC_RUN_ID).
    warm_start
        The schedule that the training runs now: the search starts there, and only better schedules are offered.
    key
        The service's API key, by default OPTPIPE_KEY of the environment.
    cache
        Without a service: solved schedules, such as `optpipe_cache.Cache(path)`. The search starts from what is
        there, and what it finds is kept there. The service has a cache of its own.
    options
        `ClientOptions`, of the search. Threads and memory are at most those of the service's worker.
    """

    def __init__(
        self,
        url: str | None,
        problem: Problem,
        *,
        warm_start: Schedule | None = None,
        key: str | None = None,
        cache: ScheduleCache | None = None,
        **options: Unpack[SolveArguments],
    ) -> None:
        self._options = ClientOptions.from_arguments("ScheduleClient", options)
        self._url, self._key, self._cache = service_url(url, cache), api_key(key), cache
        self._outages: set[type[ServiceError]] = set()  # that the log has a warning of
        # The problems of the caller, and what was found for them.
        self._asked = self._searched = 0  # how many problems there were, and how many searches are over
        self._newest: deque[tuple[int, Offer]] = deque(maxlen=1)  # with the number of the problem that it is for
        self._adoptions: dict[tuple[str, int], dict[str, Any]] = {}  # by job and incumbent: what is not reported yet
        # The search that runs.
        self._number = self._version = 0  # of its problem, and of the last offer
        self._searching: asyncio.Task[None] | None = None
        self._one_search = asyncio.Lock()
        self._best: Schedule | None = None
        self._best_ms = NO_SCHEDULE_MS
        # The job on the service.
        self._job: str | None = None
        self._seen = 0  # the number of its last incumbent; here, how many there were
        self._problem_version = 1
        self._posed = False  # whether it has the problem that is searched
        self._submission: tuple[str, bytes] | None = None  # key and body, until it is answered
        self._to_report, self._closing = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.new_event_loop()  # it needs no closing if an argument was wrong
        self._thread = threading.Thread(target=self._run, name="optpipe-client", daemon=True)
        self.update(problem, warm_start)
        self._thread.start()

    # Calls of the training. None of them waits: they schedule calls in the thread's loop.

    def poll(self) -> Offer | None:
        """The newest better schedule for the current problem, once; None if there is none. Never blocks."""
        try:
            number, offer = self._newest.popleft()
        except IndexError:
            return None
        return offer if number == self._asked else None

    def update(self, problem: Problem, warm_start: Schedule | None) -> None:
        """Changes the problem, for example its times. Never blocks.

        The search goes on from the best schedule that the service has, or, if there must be a new search, from
        `warm_start`. Only schedules better than `warm_start`, which runs, are offered.
        """
        self._asked += 1
        self._in_thread(self._search_for, self._asked, problem, warm_start)

    def adopted(self, offer: Offer, step: int, measured_iteration_ms: float | None = None) -> None:
        """Reports to the service that the training runs an offer since `step`. Call it again with the measured time,
        which replaces the report before. Never blocks: the report is sent when the service is there, unless it has
        purged the job."""
        content: dict[str, Any] = {"step": int(step)}
        if measured_iteration_ms is not None:
            content["measured_iteration_ms"] = float(measured_iteration_ms)  # it may be one of numpy's
        self._in_thread(self._adopt, (offer.job, offer.seq), content)

    @property
    def why_none(self) -> str:
        """Why there is nothing to poll, for people."""
        if self._outages:
            return "the service cannot be used"
        if self._newest:
            return f"one of {self._best_ms:.4g} ms came after the last step"
        best = f"of {self._best.makespan_ms:.4g} ms" if self._best else "that it began with"
        return f"none is shorter than the one {best}, and the search {'is over' if self.ended else 'goes on'}"

    @property
    def ended(self) -> bool:
        """Whether the search is over: the next offer to poll is the last."""
        return self._searched == self._asked

    def close(self) -> None:
        """Stops following; the service ends the search. Waits up to `REPORT_S` if the service is slow or away."""
        self._in_thread(self._closing.set)
        self._thread.join(CLOSE_S)

    def __enter__(self) -> ScheduleClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _in_thread(self, call: Any, *arguments: Any) -> None:
        with suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(call, *arguments)

    # In the thread

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        async with AsyncExitStack() as stack:
            if self._url is not None:
                self._http = await stack.enter_async_context(http_client(self._url, self._key))
            reporting = asyncio.create_task(self._report_adoptions())
            await self._closing.wait()
            if self._searching is not None:
                self._searching.cancel()
            self._to_report.set()
            with suppress(TimeoutError, ServiceError):
                async with asyncio.timeout(REPORT_S):
                    await asyncio.wait([reporting])
                    if self._job is not None and not self.ended:
                        await request(self._http, "POST", f"/v1/jobs/{self._job}/cancel")
            reporting.cancel()
            await asyncio.wait([task for task in (reporting, self._searching) if task is not None])

    def _search_for(self, number: int, problem: Problem, running: Schedule | None) -> None:
        if self._searching is not None:
            self._searching.cancel()
        self._searching = asyncio.create_task(self._search(number, problem, running))

    async def _search(self, number: int, problem: Problem, running: Schedule | None) -> None:
        async with self._one_search:
            self._number, self._problem, self._best, self._best_ms = number, problem, running, NO_SCHEDULE_MS
            if running is not None:  # offers must be shorter, if it is still valid for the problem
                placed = running.placement.apply(problem) if running.placement else problem
                on_problem = replace(running, problem=placed)
                self._best_ms = NO_SCHEDULE_MS if check(placed, on_problem) else self._value_ms(on_problem)
            try:
                await (self._search_here() if self._url is None else self._search_on_service())
            except Exception:
                log.exception("the search for schedules failed; training goes on with the schedule it has")
        self._searched = number

    def _value_ms(self, schedule: Schedule) -> float:
        """What the search minimizes, computed here."""
        value_ms = Result.from_schedule(schedule, self._options).value_ms
        assert value_ms is not None, "a schedule has a value"
        return value_ms

    def _offer(self, schedule: Schedule, job: str, seq: int) -> None:
        """Offers the schedule, if it is better than all before."""
        if (value_ms := self._value_ms(schedule)) < self._best_ms:
            self._best, self._best_ms = schedule, value_ms
            self._version += 1
            self._newest.append((self._number, Offer(self._version, schedule, job, seq)))

    # A search on this host

    async def _search_here(self) -> None:
        """Searches in processes nicer than the training, to the time limit or a proof; cancelling ends them."""
        options = self._options.arguments()
        begin = partial(improve, self._problem, warm_start=self._best, cache=self._cache, admit=_be_nicer, **options)
        try:
            search = await asyncio.to_thread(begin)
            try:
                while result := await asyncio.to_thread(next, search, None):
                    last = result
                    if result.schedule is not None:
                        self._seen += 1
                        self._offer(result.schedule, HERE, self._seen)
            finally:
                search.cancel()
        except OptPipeError as error:
            log.warning("there is no search for schedules: %s", error)
            return
        for note in last.notes:
            log.log(logging.INFO if note in last.reports else logging.WARNING, "the search for schedules: %s", note)
        if last.schedule is None:
            log.warning("the search for schedules ended as %s: %s", last.status, last.reason)
        else:
            log.info("the search for schedules has ended")

    # A search on the service: one job, which goes on with changed costs

    async def _search_on_service(self) -> None:
        """Searches until the service has ended the search for this problem, or refuses it."""
        self._longest = longest_answer(self._problem, self._options.placements)
        self._posed, self._submission = False, None
        try:
            async for attempt in _retrying(UnavailableError, InvalidAnswerError, failed=self._begin_outage):
                with attempt:
                    await self._follow_job(attempt.retry_state)
        except UnauthorizedError as error:
            self._begin_outage(error)
        except RefusedError as refusal:
            log.warning("the solver service at %s refuses this problem: %s", self._url, refusal)

    async def _follow_job(self, attempts: RetryCallState) -> None:
        """Submits a job if there is none, then takes incumbents as they come, to the end of the search."""
        try:
            if self._job is not None and not self._posed:
                await self._pose(self._job)
            if self._job is None:
                await self._submit()
            assert self._job is not None
            opened = time.monotonic()
            async with aclosing(events(self._http, self._job, self._seen)) as stream:
                async for event in stream:
                    end = parse(JobState, event.data) if event.event == "end" else None
                    new = event.event == "incumbent" and await self._take(self._job, parse(IncumbentEvent, event.data))
                    # Not at every event: a service that comes and goes would fill the log.
                    if end or new or time.monotonic() - opened > LONGEST_S:
                        self._end_outages(UnavailableError, UnauthorizedError)
                        attempts.attempt_number = 0  # the next wait is a first one
                    if end:
                        return self._log_end(end)
            end = parse(JobState, await request(self._http, "GET", f"/v1/jobs/{self._job}"))
        except RefusedError as refusal:
            if refusal.status != 404 or self._job is None:
                raise
            self._job = None  # it was purged, or the service has another database
            raise UnavailableError("it does not know the job any more") from None
        if end.state in ("queued", "running"):
            raise UnavailableError("it said that the job was over")
        self._end_outages(UnavailableError, UnauthorizedError)
        return self._log_end(end)

    async def _submit(self) -> None:
        """Submits a job. Until there is an answer the request keeps its idempotency key, so the service makes one job,
        however often it is sent."""
        if self._submission is None:
            options = self._options.model_dump(mode="json", exclude_none=True)
            content: dict[str, Any] = {"problem": self._named_problem(), **options}
            body = json.dumps(content).encode()
            if self._best is not None:
                start = ScheduleFile.from_schedule(self._best, with_ops=False)
                content["warm_start"] = start.model_dump(mode="json", exclude_none=True)
                with_start = json.dumps(content).encode()
                body = with_start if len(with_start) <= LONGEST_REQUEST else body
            self._submission = uuid4().hex, body
        key, body = self._submission
        job = parse(JobAnswer, await request(self._http, "POST", "/v1/jobs", body, {"Idempotency-Key": key}))
        self._job, self._seen, self._posed, self._submission = job.id, 0, True, None
        self._problem_version = job.problem_version

    def _named_problem(self) -> dict[str, Any]:
        """The problem, whose name is the job's in the service."""
        return {**self._problem.to_dict(), "name": self._problem.name or run_name()}

    async def _pose(self, job: str) -> None:
        """Gives the job this problem; the search goes on from the best schedule that the service has. A job that cannot
        change its problem is cancelled, and another takes its place."""
        content = {"problem": self._named_problem()}
        try:
            answer = parse(JobAnswer, await request(self._http, "POST", f"/v1/jobs/{job}/problem", content))
            self._problem_version, self._posed = answer.problem_version, True
        except RefusedError as refusal:
            if refusal.status == 409:
                with suppress(ServiceError):
                    await request(self._http, "POST", f"/v1/jobs/{job}/cancel")
            elif refusal.status != 404:
                raise
            self._job = None

    async def _take(self, job: str, event: IncumbentEvent) -> bool:
        """Fetches an incumbent, checks it, and offers it. Returns whether there was a new one."""
        if event.seq <= self._seen:
            return False
        if event.problem_version is not None and event.problem_version < self._problem_version:  # for earlier costs
            self._seen = event.seq
            return False
        path = f"/v1/jobs/{job}/incumbents/{event.seq}"
        try:
            answer = await request(self._http, "GET", path, longest=self._longest)
            schedule = verified(answer, self._problem, self._options.placements)
        except InvalidAnswerError:
            self._seen = event.seq  # it is not fetched again
            raise
        self._seen = event.seq
        self._end_outages(InvalidAnswerError)
        self._offer(schedule, job, event.seq)
        return True

    def _log_end(self, end: JobState) -> None:
        if end.state == "done":
            log.info("the solver service at %s has finished its search", self._url)
        else:
            log.warning("the solver service at %s ended its search as %s: %s", self._url, end.state, end.reason)

    # Reports of adoptions

    def _adopt(self, incumbent: tuple[str, int], content: dict[str, Any]) -> None:
        if self._url is not None:
            self._adoptions[incumbent] = content
            self._to_report.set()

    async def _report_adoptions(self) -> None:
        """Reports adoptions one by one, until each is taken or refused; after `close` until none is left."""
        while self._adoptions or not self._closing.is_set():
            await self._to_report.wait()
            self._to_report.clear()
            while self._adoptions:
                job, seq = incumbent = next(iter(self._adoptions))
                try:
                    async for attempt in _retrying(UnavailableError):
                        with attempt:
                            content = self._adoptions[incumbent]
                            await request(self._http, "PUT", f"/v1/jobs/{job}/adoptions/{seq}", content)
                except UnauthorizedError as unauthorized:
                    self._begin_outage(unauthorized)
                except ServiceError as refusal:
                    log.warning("the adoption of schedule %d of job %s was not taken: %s", seq, job, refusal)
                if self._adoptions[incumbent] is content:
                    del self._adoptions[incumbent]

    # One warning for each outage, however many attempts it takes, and one line when it is over

    def _begin_outage(self, error: ServiceError) -> None:
        kind = type(error)
        if kind not in self._outages:
            self._outages.add(kind)
            begins, _ = OUTAGES[kind]
            text = "the solver service at %s %s: %s; training goes on with the schedule it has"
            log.warning(text, self._url, begins, error)

    def _end_outages(self, *kinds: type[ServiceError]) -> None:
        for kind in self._outages & {*kinds}:
            self._outages.remove(kind)
            log.info("the solver service at %s %s", self._url, OUTAGES[kind][1])


def _retrying(*kinds: type[ServiceError], failed: Any = lambda error: None) -> AsyncRetrying:
    """Attempts until one succeeds, or fails in another way; `failed` gets each error before the wait."""
    return AsyncRetrying(
        retry=retry_if_exception_type(kinds),
        wait=wait_s,
        before_sleep=lambda state: failed(state.outcome and state.outcome.exception()),
    )


def wait_s(state: RetryCallState) -> float:
    """The wait before the next attempt. It is never shorter than the service asks for, and has jitter, so that clients
    that were sent away together come back one by one."""
    error = state.outcome and state.outcome.exception()
    asked_s = error.retry_after_s if isinstance(error, ServiceError) else 0.0
    delay_s = wait_exponential(multiplier=FIRST_S, max=LONGEST_S)(state) * random.uniform(0.5, 1.0)
    return max(delay_s, asked_s * random.uniform(1.0, 1.2))


def _be_nicer(pid: int) -> None:
    """Lets the solver compute where the training does not."""
    with suppress(OSError):  # it has ended
        os.setpriority(os.PRIO_PROCESS, pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICER))
