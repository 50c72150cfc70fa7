"""A job's incumbents as server-sent events: `id` is the incumbent's number, comments keep it alive, `end` is last."""

from __future__ import annotations

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from optpipe_server.http.context import disconnected
from optpipe_server.http.job_updates import JobUpdates, Topic
from optpipe_server.metrics import STREAMS

PING = b": ping\n\n"
AT_ONCE = 100  # events that are sent together; a slow client holds no more of them in memory


class EventStream(Response):
    """Sends every incumbent numbered above `after`, old and new, until the job or the service ends."""

    media_type = "text/event-stream"

    def __init__(self, updates: JobUpdates, tenant: str, job_id: str, version: int, after: int, ping_s: float) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._subscribed = updates.subscribe(tenant, job_id, version)
        self._after, self._ping_s = after, ping_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._subscribed as topic, anyio.create_task_group() as group:

            async def until_disconnected() -> None:
                await disconnected(receive)
                group.cancel_scope.cancel()

            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            group.start_soon(until_disconnected)
            with STREAMS.track_inprogress():
                await self._send_events(topic, send)
            await send({"type": "http.response.body", "body": b""})
            group.cancel_scope.cancel()

    async def _send_events(self, topic: Topic, send: Send) -> None:
        sent = self._after
        while not topic.closing:
            # `over` is read first, so that events added in between are sent before the end.
            over = topic.over
            fresh = topic.events[sent : sent + AT_ONCE]
            sent += len(fresh)
            if fresh:
                await send({"type": "http.response.body", "body": b"".join(fresh), "more_body": True})
            elif over:
                await send({"type": "http.response.body", "body": topic.end, "more_body": True})
                return
            elif not await topic.change(self._ping_s):
                await send({"type": "http.response.body", "body": PING, "more_body": True})
