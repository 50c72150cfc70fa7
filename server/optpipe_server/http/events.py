"""A job's incumbents as server-sent events: `id` is the number, a comment is a sign of life, `end` is the last."""

from __future__ import annotations

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from optpipe_server.http.context import disconnected
from optpipe_server.http.job_updates import JobUpdates, Topic
from optpipe_server.metrics import STREAMS

PING = b": ping\n\n"
AT_ONCE = 100  # events that are sent together: who reads slowly holds no more than that


class EventStream(Response):
    """Every incumbent numbered above `after`, those that are there and those to come, until the job or the service
    ends."""

    media_type = "text/event-stream"

    def __init__(self, feed: JobUpdates, job_id: str, version: int, after: int, ping_s: float) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._feed, self._job_id, self._version, self._after, self._ping_s = feed, job_id, version, after, ping_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._feed.subscribe(self._job_id, self._version) as topic, anyio.create_task_group() as group:

            async def until_disconnected() -> None:
                await disconnected(receive)
                group.cancel_scope.cancel()

            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            group.start_soon(until_disconnected)
            with STREAMS.track_inprogress():
                await self._tell(topic, send)
            await send({"type": "http.response.body", "body": b""})
            group.cancel_scope.cancel()

    async def _tell(self, topic: Topic, send: Send) -> None:
        sent = self._after
        while not topic.closing:
            over, fresh = (
                topic.over,
                topic.events[sent : sent + AT_ONCE],
            )  # in this order: what comes in between is sent before the end
            sent += len(fresh)
            if fresh:
                await send({"type": "http.response.body", "body": b"".join(fresh), "more_body": True})
            elif over:
                await send({"type": "http.response.body", "body": topic.end, "more_body": True})
                return
            elif not await topic.change(self._ping_s):
                await send({"type": "http.response.body", "body": PING, "more_body": True})
