"""Who waits for news of jobs. One question a poll, however many wait; a job that has changed is read once for all of
them.

News are polled: workers of other processes write them, and what stands in the database cannot be missed, also not while
it was away.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio.to_thread
import structlog
from sqlalchemy import Row

from optpipe_server.database import Jobs
from optpipe_server.http.replies import ReplyError
from optpipe_server.http.views import end_event, event, incumbent_view, over

log = structlog.get_logger("optpipe.feed")

POLL_S = 0.05
POLL_WHEN_AWAY_S = 0.5  # while the database is away
FIRST_NEWS_S = 10.0  # how long one who begins to watch waits for what there is


class Topic:
    """A job that somebody watches: as it was last read, and each of its incumbents as an event, the first is number
    1."""

    def __init__(self) -> None:
        self.version = 0  # 0: not read yet
        self.job: Row[Any] | None = None
        self.events: list[bytes] = []
        self.last: Row[Any] | None = None  # incumbent
        self.end = b""  # the last event, of a job that is over
        self.watchers = 0
        self.closing = False
        self._changed = asyncio.Event()

    @property
    def gone(self) -> bool:
        """The job has been purged."""
        return self.version > 0 and self.job is None

    @property
    def over(self) -> bool:
        return self.gone or (self.job is not None and over(self.job))

    def update(self, job: Row[Any] | None, incumbents: Sequence[Row[Any]]) -> None:
        """What was read: the job as it is, or that it is gone, and the incumbents that were not known yet."""
        self.last = incumbents[-1] if incumbents else self.last
        self.events += [event("incumbent", incumbent_view(incumbent), incumbent.seq) for incumbent in incumbents]
        self.end = end_event(job, self.last) if job is not None and over(job) else b""
        self.job, self.version = job, job.version if job is not None else self.version + 1

    def tell(self) -> None:
        """Wakes all who wait, now; who waits from then on waits for the next news."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self, timeout_s: float) -> bool:
        """Whether there were news within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def until(self, ready: Callable[[Topic], bool], timeout_s: float) -> bool:
        """Whether it came to be ready within the time; not where the service ends."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not self.closing:
            if ready(self):
                return True
            if not await self.change(max(0.0, deadline - loop.time())):
                return ready(self)
        return False


class JobUpdates:
    """The topics of one process. `run` belongs to its event loop, as does all else here."""

    def __init__(self, jobs: Jobs, most: int) -> None:
        self._jobs, self._most = jobs, most
        self._topics: dict[str, Topic] = {}
        self._watchers = 0
        self._new = asyncio.Event()  # somebody has begun to watch
        self._limiter = anyio.CapacityLimiter(1)  # a thread that no other question can keep busy
        self.closing = False

    def close(self) -> None:
        """Everyone stops waiting, for good."""
        self.closing = True
        self._new.set()
        for topic in self._topics.values():
            topic.closing = True
            topic.tell()

    @asynccontextmanager
    async def subscribe(self, job_id: str, version: int) -> AsyncIterator[Topic]:
        """The job's topic, no older than the version that the caller knows. Raises `ReplyError` where too many watch,
        or at the end."""
        if self.closing:
            raise ReplyError(503, "The service is about to end.", {"Retry-After": "5"})
        if self._watchers >= self._most:
            raise ReplyError(503, f"{self._most} clients follow jobs here already.", {"Retry-After": "5"})
        topic = self._topics.setdefault(job_id, Topic())
        topic.watchers += 1
        self._watchers += 1
        try:
            if topic.version < version:
                self._new.set()
                if not await topic.until(lambda topic: topic.gone or topic.version >= version, FIRST_NEWS_S):
                    raise ReplyError(503, "The database cannot be used at the moment.", {"Retry-After": "5"})
            yield topic
        finally:
            self._watchers -= 1
            topic.watchers -= 1
            if topic.watchers == 0:
                self._topics.pop(job_id, None)

    async def run(self) -> None:
        """Polls while anybody watches, until `close`."""
        away = False
        while not self.closing:
            self._new.clear()
            try:
                await self._poll()
                if away:
                    log.info("the database is there again")
                away = False
            except Exception as error:  # whatever it is: those who wait are told as soon as it is over
                if not away:
                    log.warning(
                        "no news of jobs: the database is away", error=str(getattr(error, "orig", None) or error)
                    )
                away = True
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_WHEN_AWAY_S if away else POLL_S if self._topics else None):
                    await self._new.wait()

    async def _poll(self) -> None:
        watched = {job_id: topic for job_id, topic in self._topics.items() if not topic.gone}
        if not watched:
            return
        for topic in await anyio.to_thread.run_sync(self._read, watched, limiter=self._limiter):
            topic.tell()

    def _read(self, watched: Mapping[str, Topic]) -> list[Topic]:
        """Brings topics up to date; returns those that have changed. Nobody else changes one, and events are only ever
        added to."""
        versions = self._jobs.versions(list(watched))
        changed = [job_id for job_id, topic in watched.items() if versions.get(job_id) != topic.version]
        for job_id in changed:
            watched[job_id].update(*self._jobs.updates(job_id, len(watched[job_id].events)))
        return [watched[job_id] for job_id in changed]
