"""What has to be computed takes turns, so that the requests for which nothing has to be computed are answered
meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

from optpipe_server.http.replies import ReplyError

T = TypeVar("T")

MOST_WAITING = 32  # requests that wait for their turn; each keeps its body


class Turns:
    """One computation at a time, in a thread; the rest wait, and too many are sent away."""

    def __init__(self) -> None:
        self._one, self._inside = anyio.CapacityLimiter(1), 0

    async def compute(self, thought: Callable[[], T]) -> T:
        """Raises `ReplyError` where too many wait already."""
        if self._inside > MOST_WAITING:
            raise ReplyError(503, "Too many requests wait for what they ask to be computed.", {"Retry-After": "5"})
        self._inside += 1
        try:
            return await anyio.to_thread.run_sync(thought, limiter=self._one)
        finally:
            self._inside -= 1
