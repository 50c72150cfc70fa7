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
import logging
import threading
from collections import deque
from contextlib import AbstractContextManager, AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Unpack

from pydantic import BeforeValidator
from tenacity import RetryCallState

from optpipe.anytime import ScheduleCache, improve
from optpipe.errors import OptPipeError
from optpipe.evaluate.objective import NO_SCHEDULE_MS
from optpipe.model.problem import Problem
from optpipe.options import PlacementsOption, SolveArguments, SolveOptions, TimeLimit
from optpipe.process.background import be_nicer
from optpipe.results import Result
from optpipe.schedule import Schedule, check
from optpipe.text import printable
from optpipe_runtime.service.job import ServiceJob, retrying
from optpipe_runtime.service.requests import (
    LONGEST_REASON,
    InvalidAnswerError,
    RefusedError,
    ServiceError,
    UnauthorizedError,
    UnavailableError,
    api_key,
    http_client,
    request,
    service_url,
)

log = logging.getLogger("optpipe.client")

REPORT_S = 3.0  # how long `close` waits until the service has the last adoptions, and has ended the search
STEADY_S = 30.0  # after so long without a failure an outage is over: one that comes and goes would fill the log
LEASE_S = 60.0  # without a sign of life the service ends the search
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


class ScheduleClient(AbstractContextManager["ScheduleClient"]):
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
        self._job: ServiceJob | None = None
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
            with suppress(TimeoutError):
                async with asyncio.timeout(REPORT_S):
                    await asyncio.gather(self._cancel_job(), asyncio.wait([reporting]))
            reporting.cancel()
            await asyncio.wait([task for task in (reporting, self._searching) if task is not None])

    async def _cancel_job(self) -> None:
        with suppress(ServiceError):
            if self._job is not None and not self.ended:
                await self._job.cancel()

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
        begin = partial(improve, self._problem, warm_start=self._best, cache=self._cache, admit=be_nicer, **options)
        try:
            search = await asyncio.to_thread(begin)
            try:
                while result := await asyncio.to_thread(next, search, None):
                    last = result
                    if result.schedule is not None:
                        self._offer(result.schedule, HERE, len(result.history))
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
        if self._job is None:
            self._job = ServiceJob(self._http, self._problem, self._options, LEASE_S)
        self._job.change(self._problem)
        renewing = asyncio.create_task(self._job.renew())
        try:
            async for attempt in retrying(UnavailableError, InvalidAnswerError, failed=self._begin_outage):
                with attempt:
                    await self._follow(self._job, attempt.retry_state)
        except UnauthorizedError as error:
            self._begin_outage(error)
        except RefusedError as refusal:
            log.warning("the solver service at %s refuses this problem: %s", self._url, refusal)
        finally:
            renewing.cancel()

    async def _follow(self, job: ServiceJob, attempts: RetryCallState) -> None:
        """Takes incumbents as they come, to the end of the search."""
        await job.pose(self._best)
        steady = self._loop.call_later(STEADY_S, self._end_outages, *OUTAGES)
        try:
            async with aclosing(job.schedules()) as schedules:
                async for seq, schedule in schedules:
                    self._end_outages(*OUTAGES)
                    attempts.attempt_number = 0  # the next wait is a first one
                    self._offer(schedule, str(job.id), seq)
        finally:
            steady.cancel()
        self._end_outages(UnavailableError, UnauthorizedError)
        if job.end.state == "done":
            log.info("the solver service at %s has finished its search", self._url)
        else:
            text = printable(f"{job.end.state}: {job.end.reason}", LONGEST_REASON)
            log.warning("the solver service at %s ended its search as %s", self._url, text)

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
                    async for attempt in retrying(UnavailableError):
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
