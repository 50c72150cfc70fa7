"""`JobUpdates`: event streams and waiting requests learn what has changed in their jobs.

It polls the database, since workers in other processes write to it, and what is stored there cannot be missed, even
while the database was away. One query per poll asks for all jobs; a job that has changed is read once for all of its
subscribers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.to_thread
import structlog
from pydantic import BaseModel
from sqlalchemy import Row
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus

from optpipe_server.database import Jobs
from optpipe_server.database.engine import first_line
from optpipe_server.database.jobs import is_best, is_over
from optpipe_server.http.replies import AWAY, ENDING, SOON_S, ReplyError
from optpipe_server.http.schemas import EndedJob, Incumbent
from optpipe_server.metrics import STREAMS

log = structlog.get_logger("optpipe.updates")

AppStatus.enable_automatic_graceful_drain = False  # `JobUpdates.close` ends streams in order, and earlier

POLL_S = 0.05
POLL_WHEN_AWAY_S = 0.5  # while the database is away
FIRST_READ_S = 10.0  # how long a new subscriber waits for the job to be read
READ_S = 30.0  # how long a client may leave what it is sent unread
AT_ONCE = 100  # events that are sent together; a slow client holds no more of them in memory


class Topic:
    """A job that somebody follows: its last state read, and its incumbents as events; the first has number 1."""

    def __init__(self) -> None:
        self.version = 0  # 0: not read yet
        self.job: Row[Any] | None = None
        self.events: list[bytes] = []
        self.last: Row[Any] | None = None  # incumbent
        self.end = b""  # the last event, of a job that is over: the job, and its best incumbent in short form
        self.subscribers = 0
        self.closing = False
        self.changed = asyncio.Event()  # another one after each change

    @property
    def gone(self) -> bool:
        """Whether the job has been purged."""
        return self.version > 0 and self.job is None

    @property
    def over(self) -> bool:
        return self.gone or (self.job is not None and is_over(self.job))

    def update(self, job: Row[Any] | None, incumbents: Sequence[Row[Any]]) -> None:
        """Set what was read: the job, or None if it is gone, and its incumbents that are new."""
        self.last = incumbents[-1] if incumbents else self.last
        self.events += [event("incumbent", Incumbent.from_row(each), each.seq) for each in incumbents]
        self.end = b""
        if job is not None and is_over(job):
            best = Incumbent.from_row(self.last) if self.last is not None and is_best(job, self.last) else None
            self.end = event("end", EndedJob.from_row(job, best=best), job.last_seq)
        self.job, self.version = job, job.version if job is not None else self.version + 1

    def notify(self) -> None:
        """Wake all tasks that wait for a change."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def until(self, ready: Callable[[Topic], bool], timeout_s: float) -> bool:
        """Wait until `ready` holds; return whether it does within the time, False if the service ends."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (self.closing or ready(self)):
                    await self.changed.wait()
        return not self.closing and ready(self)


class JobUpdates:
    """The topics of one process; used from its event loop only."""

    def __init__(self, jobs: Jobs, most: int) -> None:
        self._jobs = jobs
        self._most = most
        self._topics: dict[str, Topic] = {}
        self._subscribed = asyncio.Event()  # set when there is a new subscriber
        self._limiter = anyio.CapacityLimiter(1)  # a thread of its own, which no other query can keep busy
        self.closing = False

    def close(self) -> None:
        """End all waits for good."""
        self.closing = True
        self._subscribed.set()
        for topic in self._topics.values():
            topic.closing = True
            topic.notify()

    def require_room(self) -> None:
        """Raise `ReplyError` (503) if there are too many subscribers, or the service is about to end."""
        if self.closing:
            raise ReplyError(503, ENDING, retry_s=SOON_S)
        if sum(topic.subscribers for topic in self._topics.values()) >= self._most:
            raise ReplyError(503, f"busy: {self._most} clients follow jobs; retry in {SOON_S} s", retry_s=SOON_S)

    @asynccontextmanager
    async def subscribe(self, job_id: str, version: int) -> AsyncIterator[Topic]:
        """Yield the job's topic, at least as new as `version`. Raises as `require_room`, and if it cannot be read."""
        self.require_room()
        topic = self._topics.setdefault(job_id, Topic())
        topic.subscribers += 1
        try:
            if topic.version < version:
                self._subscribed.set()
                if not await topic.until(lambda topic: topic.gone or topic.version >= version, FIRST_READ_S):
                    raise ReplyError(503, AWAY, retry_s=SOON_S)
            yield topic
        finally:
            topic.subscribers -= 1
            if topic.subscribers == 0:
                self._topics.pop(job_id, None)

    def stream(self, job_id: str, version: int, after: int, ping_s: float) -> EventSourceResponse:
        """Return every incumbent numbered above `after`, old and new, until the job or the service ends, as events.
        Raises as `require_room`."""
        self.require_room()

        async def events() -> AsyncIterator[bytes]:
            with suppress(ReplyError), STREAMS.track_inprogress():  # what can only end the stream, since it has begun
                async with self.subscribe(job_id, version) as topic:
                    async for chunk in events_of(topic, after):
                        yield chunk

        return EventSourceResponse(events(), ping=ping_s, sep="\n", send_timeout=READ_S)

    async def run(self) -> None:
        """Poll while there are subscribers, until `close`."""
        away = False
        while not self.closing:
            self._subscribed.clear()
            try:
                if topics := {job_id: topic for job_id, topic in self._topics.items() if not topic.gone}:
                    for topic in await anyio.to_thread.run_sync(self._read, topics, limiter=self._limiter):
                        topic.notify()
                if away:
                    log.info("the database is back")
                away = False
            except Exception as error:  # whatever it is, subscribers keep waiting until it is over
                if not away:
                    log.warning("jobs cannot be followed: the database is away", error=first_line(error))
                away = True
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_WHEN_AWAY_S if away else POLL_S if self._topics else None):
                    await self._subscribed.wait()

    def _read(self, topics: Mapping[str, Topic]) -> list[Topic]:
        """Read the topics that have changed, and return them. Only this changes a topic; events are only appended."""
        versions = self._jobs.versions(list(topics))
        changed = [job_id for job_id, topic in topics.items() if versions.get(job_id) != topic.version]
        for job_id in changed:
            topics[job_id].update(*self._jobs.updates(job_id, len(topics[job_id].events)))
        return [topics[job_id] for job_id in changed]


def event(name: str, data: BaseModel, number: int) -> bytes:
    """Return a server-sent event."""
    return ServerSentEvent(data.model_dump_json(), event=name, id=str(number), sep="\n").encode()


async def events_of(topic: Topic, after: int) -> AsyncIterator[bytes]:
    """Yield the topic's events numbered above `after` as they come, and its end."""
    sent = after
    while not topic.closing:
        over = topic.over  # read first, so that events added in between are sent before the end
        fresh = topic.events[sent : sent + AT_ONCE]
        sent += len(fresh)
        if fresh:
            yield b"".join(fresh)
        elif over:
            yield topic.end
            return
        else:
            await topic.changed.wait()
