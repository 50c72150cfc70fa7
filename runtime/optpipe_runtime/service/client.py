"""`ScheduleClient`: asks the solver service for schedules while the training runs, and never makes a step wait.

    client = ScheduleClient("http://127.0.0.1:8000", problem)  # on one rank; the ranks agree among themselves
    if offer := client.poll():                                 # between two iterations; microseconds
        swap(offer.schedule)
        client.adopted(offer, step)                            # and again with what an iteration takes, once that is
        measured
    client.update(measured, running)                           # the costs have changed: the search goes on with them

All waiting is done by one daemon thread. Every schedule is checked here before it is offered: the service may be wrong.
Where it is away, slow or wrong, there is nothing to poll, the log has one warning an outage, and the training goes on
with the schedule it has.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from optpipe.evaluate.objective import Objective
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime.service.search import Search
from optpipe_runtime.service.wire import (
    AwayError,
    Backoff,
    ClosedError,
    DeniedError,
    Outages,
    Wire,
    WrongError,
    api_key,
    base_url,
)

log = logging.getLogger("optpipe.client")

TELL_S = 3.0  # a close waits no longer until the service has heard of adoptions,
CLOSE_S = 6.0  # nor for the thread; it is a daemon


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


class ScheduleClient:
    """Follows one problem on the service at `url`.

    `warm_start` is the schedule that the training runs now: the search starts there, and only what is better is
    offered. `key` is the service's API key, by default OPTPIPE_KEY of the environment. Times are seconds; after a
    failure the next try waits from `backoff_s[0]`, doubled each time, up to `backoff_s[1]`, with jitter, and as long as
    the service asks for. Raises `InputError` for a url or a key that is none; everything else that can go wrong later
    is the log's.
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
        key: str | None = None,
        connect_timeout_s: float = 2.0,
        read_timeout_s: float = 45.0,
        backoff_s: tuple[float, float] = (0.5, 30.0),
    ) -> None:
        url = base_url(url)
        self._backoff_s, self._outages = backoff_s, Outages(url)
        self._wire = Wire(url, api_key(key), connect_timeout_s, read_timeout_s)
        request = {"method": method, "time_limit_s": time_limit_s}
        self._search = Search(url, self._wire, request, objective, self._outages, Backoff(*backoff_s), self._found)
        self._version = 0
        self._newest: deque[Offer] = deque(maxlen=1)
        self._asked = self._searched = 0  # problems: how many the caller has given, how many searches are over
        self._searching: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # of the searches
        self._adoptions: dict[
            tuple[str, int], dict[str, Any]
        ] = {}  # by job and incumbent: what the service has not heard yet
        self._to_tell, self._closing = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self.update(problem, warm_start)
        self._thread = threading.Thread(target=self._run, name="optpipe-client", daemon=True)
        self._thread.start()

    # The training's side. None of these waits: they leave word with the thread's loop.

    def poll(self) -> Offer | None:
        """The newest better schedule for the problem as it is now, once; None where there is none. Never blocks."""
        try:
            offer = self._newest.popleft()
        except IndexError:
            return None
        return offer if offer.schedule.problem is self._current else None

    def update(self, problem: Problem, warm_start: Schedule | None) -> None:
        """From now on another problem counts, such as the same with other times. Never blocks.

        The search goes on from the best that the service has; what is no better than `warm_start`, which runs, is not
        offered. A new search, where there has to be one, starts at `warm_start`.
        """
        self._current = problem
        self._asked += 1
        self._leave_word(self._begin, self._asked, problem, warm_start)

    def adopted(self, offer: Offer, step: int, measured_iteration_ms: float | None = None) -> None:
        """Tells the service that the training runs an offer since `step`; said again, with the time measured, it
        replaces what was said. Never blocks: told when the service is there, given up where it has purged the job."""
        content: dict[str, Any] = {"step": int(step)}
        if measured_iteration_ms is not None:
            content["measured_iteration_ms"] = float(measured_iteration_ms)  # no longer numpy's, if it was
        self._leave_word(self._adopt, (offer.job, offer.seq), content)

    @property
    def ended(self) -> bool:
        """Whether the search is over: what has not been polled by now is the last offer."""
        return self._searched == self._asked

    def close(self) -> None:
        """Stops following; the job on the service goes on to its own end. Waits up to `TELL_S` if adoptions are still
        to be told."""
        self._leave_word(self._closing.set)
        self._thread.join(CLOSE_S)

    def _leave_word(self, call: Callable[..., object], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(call, *arguments)

    def __enter__(self) -> ScheduleClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The thread's side

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        async with self._wire:
            telling = asyncio.create_task(self._tell())
            await self._closing.wait()
            if self._searching is not None:
                self._searching.cancel()
            self._to_tell.set()
            await asyncio.wait([telling], timeout=TELL_S)
            telling.cancel()
            await asyncio.wait([task for task in (telling, self._searching) if task is not None])

    def _begin(self, number: int, problem: Problem, warm_start: Schedule | None) -> None:
        if self._searching is not None:
            self._searching.cancel()
        self._searching = asyncio.create_task(self._follow(number, problem, warm_start))

    async def _follow(self, number: int, problem: Problem, warm_start: Schedule | None) -> None:
        async with self._turn:
            try:
                await self._search.follow(problem, warm_start)
            except Exception:
                log.exception("the client of the solver service failed; training goes on with the schedule it has")
        self._searched = number

    def _found(self, schedule: Schedule, job: str, seq: int) -> None:
        self._version += 1
        self._newest.append(Offer(self._version, schedule, job, seq))

    def _adopt(self, incumbent: tuple[str, int], content: dict[str, Any]) -> None:
        self._adoptions[incumbent] = content
        self._to_tell.set()

    async def _tell(self) -> None:
        """Adoptions, one after the other, until each has been heard or refused; at the end of the client until none is
        left."""
        backoff = Backoff(*self._backoff_s)
        while self._adoptions or not self._closing.is_set():
            await self._to_tell.wait()
            self._to_tell.clear()
            while self._adoptions:
                incumbent, content = next(iter(self._adoptions.items()))
                try:
                    await self._wire.ask("PUT", "/v1/jobs/{}/adoptions/{}".format(*incumbent), content)
                except AwayError as away:
                    await backoff.wait(away.retry_after_s)
                    continue
                except ClosedError as closed:
                    self._outages.begin("closed", closed)
                except (WrongError, DeniedError) as refusal:
                    log.warning(
                        "the adoption of schedule %d of job %s was not taken: %s", incumbent[1], incumbent[0], refusal
                    )
                except Exception:
                    log.exception("the client of the solver service failed to tell an adoption")
                backoff.forget()
                if self._adoptions[incumbent] is content:
                    del self._adoptions[incumbent]
