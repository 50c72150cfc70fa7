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
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Unpack

from optpipe.known import ScheduleCache
from optpipe.model.problem import Problem
from optpipe.options import SolveArguments, SolveOptions, TimeLimit
from optpipe.schedule import Schedule
from optpipe_runtime.service.background import Background
from optpipe_runtime.service.connection import ServiceConnection, api_key, service_url
from optpipe_runtime.service.errors import InvalidAnswerError, RefusedError, UnauthorizedError, UnavailableError
from optpipe_runtime.service.local_search import HERE, LocalSearch
from optpipe_runtime.service.outages import Backoff, Outages
from optpipe_runtime.service.remote_search import RemoteSearch

log = logging.getLogger("optpipe.client")

TELL_S = 3.0  # how long `close` waits until the service has been told of adoptions
CLOSE_S = 6.0  # how long `close` waits for the thread, which is a daemon


class ClientOptions(SolveOptions):
    """What a client asks of its searches, which run beside a training."""

    time_limit_s: TimeLimit = 600.0


@dataclass(frozen=True)
class Offer:
    """A schedule better than those before it, checked on this client's problem.

    Attributes
    ----------
    version
        1, 2, ... of this client.
    schedule
        The schedule.
    job, seq
        Where it comes from: the service's job, and the number of the incumbent in it.
    """

    version: int
    schedule: Schedule
    job: str
    seq: int

    @property
    def makespan_ms(self) -> float:
        """The predicted time of an iteration."""
        return self.schedule.makespan_ms


class ScheduleClient(Background):
    """Follows one problem, on a service or on this host.

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
        Without a service: solved schedules, such as `optpipe_cache.Cache(path)`. The search starts from what is known
        there, and what it finds is kept there. The service has a cache of its own.
    wanted
        Which of the better schedules to offer; by default each.
    options
        `ClientOptions`, of the search. Threads and memory are at most those of the service's worker.

    Raises
    ------
    InputError
        If the url or the key cannot be one, or an option is unknown or out of range. Whatever goes wrong later is
        logged.
    """

    def __init__(
        self,
        url: str | None,
        problem: Problem,
        *,
        warm_start: Schedule | None = None,
        key: str | None = None,
        cache: ScheduleCache | None = None,
        wanted: Callable[[Schedule], bool] = lambda _: True,
        **options: Unpack[SolveArguments],
    ) -> None:
        asked = ClientOptions.from_arguments("ScheduleClient", options)
        url = service_url(url, cache)
        self._outages = Outages(url or HERE)
        self._connection: ServiceConnection | None = None
        self._search: RemoteSearch | LocalSearch
        if url is None:
            self._search = LocalSearch(asked, cache, self._offer)
        else:
            self._connection = ServiceConnection(url, api_key(key))
            self._search = RemoteSearch(url, self._connection, asked, self._outages, self._offer)
        self._version, self._wanted = 0, wanted
        self._newest: deque[tuple[int, Offer]] = deque(maxlen=1)  # with the number of the problem that it is for
        self._asked = self._searched = 0  # how many problems the caller has given, and how many searches are over
        self._following = 0  # the number of the problem that is searched
        self._searching: asyncio.Task[None] | None = None
        self._one_search = asyncio.Lock()
        # By job and number of the incumbent: what the service has not been told yet.
        self._adoptions: dict[tuple[str, int], dict[str, Any]] = {}
        self._to_tell, self._closing = asyncio.Event(), asyncio.Event()
        super().__init__("optpipe-client")  # its loop needs no closing if an argument was wrong
        self.update(problem, warm_start)
        self._begin()

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
        """Tells the service that the training runs an offer since `step`. Call it again with the measured time, which
        replaces what was told. Never blocks: the service is told when it is there, unless it has purged the job."""
        content: dict[str, Any] = {"step": int(step)}
        if measured_iteration_ms is not None:
            content["measured_iteration_ms"] = float(measured_iteration_ms)  # it may be one of numpy's
        self._in_thread(self._adopt, (offer.job, offer.seq), content)

    @property
    def ended(self) -> bool:
        """Whether the search is over: the next offer to poll is the last."""
        return self._searched == self._asked

    def close(self) -> None:
        """Stops following. The job on the service goes on to its own end. Waits up to `TELL_S` if adoptions are still
        to be told."""
        self._in_thread(self._closing.set)
        self._thread.join(CLOSE_S)

    def __enter__(self) -> ScheduleClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # In the thread

    async def _main(self) -> None:
        async with self._connection or nullcontext():
            telling = asyncio.create_task(self._tell())
            await self._closing.wait()
            if self._searching is not None:
                self._searching.cancel()
            self._to_tell.set()
            await asyncio.wait([telling], timeout=TELL_S)
            telling.cancel()
            await asyncio.wait([task for task in (telling, self._searching) if task is not None])

    def _search_for(self, number: int, problem: Problem, warm_start: Schedule | None) -> None:
        if self._searching is not None:
            self._searching.cancel()
        self._searching = asyncio.create_task(self._follow(number, problem, warm_start))

    async def _follow(self, number: int, problem: Problem, warm_start: Schedule | None) -> None:
        async with self._one_search:
            self._following = number
            try:
                await self._search.follow(problem, warm_start)
            except Exception:
                log.exception("the client of the solver service failed; training goes on with the schedule it has")
        self._searched = number

    def _offer(self, schedule: Schedule, job: str, seq: int) -> None:
        if self._wanted(schedule):
            self._version += 1
            self._newest.append((self._following, Offer(self._version, schedule, job, seq)))

    def _adopt(self, incumbent: tuple[str, int], content: dict[str, Any]) -> None:
        self._adoptions[incumbent] = content
        self._to_tell.set()

    async def _tell(self) -> None:
        """Tells adoptions, one after the other, until the service has taken or refused each; after `close` until none
        is left."""
        if self._connection is None:
            return
        backoff = Backoff()
        while self._adoptions or not self._closing.is_set():
            await self._to_tell.wait()
            self._to_tell.clear()
            while self._adoptions:
                incumbent, content = next(iter(self._adoptions.items()))
                try:
                    await self._connection.request("PUT", "/v1/jobs/{}/adoptions/{}".format(*incumbent), content)
                except UnavailableError as unavailable:
                    await backoff.wait(unavailable.retry_after_s)
                    continue
                except UnauthorizedError as unauthorized:
                    self._outages.begin(unauthorized)
                except (InvalidAnswerError, RefusedError) as refusal:
                    log.warning(
                        "the adoption of schedule %d of job %s was not taken: %s", incumbent[1], incumbent[0], refusal
                    )
                except Exception:
                    log.exception("the client of the solver service failed to tell an adoption")
                backoff.reset()
                if self._adoptions[incumbent] is content:
                    del self._adoptions[incumbent]
