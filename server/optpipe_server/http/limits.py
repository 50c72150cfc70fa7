"""How much of something clients may have at a time; more is refused. Used from one event loop only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio
import anyio.to_thread

from optpipe_server.http.replies import ReplyError

T = TypeVar("T")

MOST_QUEUED = 32  # requests that wait; each keeps its body in memory


class Limit:
    """There are up to `most` of them at a time; `what` names them."""

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what, self._count = most, what, 0

    @contextmanager
    def one(self, wait_s: float = 4.0) -> Iterator[None]:
        """Have one more. Raises `ReplyError` (503) if there are too many; `wait_s` is when the client may try again."""
        if self._count >= self._most:
            raise ReplyError(503, f"There are {self._most} {self._what} already.", retry_s=round(wait_s) + 1)
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


class ComputeQueue:
    """Runs one computation at a time in a thread, so that requests that need none are answered meanwhile."""

    def __init__(self) -> None:
        self._one = anyio.CapacityLimiter(1)
        self._limit = Limit(MOST_QUEUED + 1, "queued computations")

    async def run(self, computation: Callable[[], T]) -> T:
        """Return what the computation returns. Raises as `Limit.one` does."""
        with self._limit.one():
            return await anyio.to_thread.run_sync(computation, limiter=self._one)
