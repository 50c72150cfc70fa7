"""`ComputeQueue`: runs computations one after the other, so that requests that need none are answered meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

from optpipe_server.http.replies import ReplyError
from optpipe_server.http.shares import Shares

T = TypeVar("T")

MOST_WAITING = 32  # requests that wait; each keeps its body in memory
OF_A_TENANT = 8  # that wait or are computed


class ComputeQueue:
    """Runs one computation at a time in a thread, and refuses more when too many wait."""

    def __init__(self) -> None:
        self._one, self._inside = anyio.CapacityLimiter(1), 0
        self._shares = Shares(OF_A_TENANT, "requests that wait for what they ask to be computed")

    async def run(self, tenant: str, computation: Callable[[], T]) -> T:
        """Return what the computation returns. Raises `ReplyError` if too many wait already (503), or too many of the
        tenant (429)."""
        if self._inside > MOST_WAITING:
            raise ReplyError(503, "Too many requests wait for what they ask to be computed.", {"Retry-After": "5"})
        with self._shares.one(tenant):
            self._inside += 1
            try:
                return await anyio.to_thread.run_sync(computation, limiter=self._one)
            finally:
                self._inside -= 1
