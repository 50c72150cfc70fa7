"""What all tenants share: how much there is of it, and how much of that one of them may have at a time. More is refused
(`Shares`, `ComputeQueue`) or waits (`Turns`). All are used from one event loop only."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import anyio
import anyio.to_thread

from optpipe_server.http.replies import ReplyError
from optpipe_server.settings import LOCAL

T = TypeVar("T")

MOST_QUEUED = 32  # requests that wait; each keeps its body in memory
QUEUED_OF_A_TENANT = 8  # that wait or are computed


class Shares:
    """There are `most`, of which a tenant may have `of_a_tenant`; without keys there is only one, who may have all."""

    def __init__(self, most: int, of_a_tenant: int, what: str) -> None:
        self._most, self._of_a_tenant, self._what = most, of_a_tenant, what
        self._held = Counter[str]()

    @contextmanager
    def one(self, tenant: str, wait_s: float = 4.0) -> Iterator[None]:
        """Hold one more for the tenant. Raises `ReplyError` if there are too many (503) or it has its share (429);
        `wait_s` is what the client is told to wait."""
        retry_s = round(wait_s) + 1
        if self._held.total() >= self._most:
            raise ReplyError(503, f"There are {self._most} {self._what} already.", retry_s=retry_s)
        if tenant != LOCAL and self._held[tenant] >= self._of_a_tenant:
            raise ReplyError(429, f"Your tenant has {self._of_a_tenant} {self._what} already.", retry_s=retry_s)
        with _counted(self._held, tenant):
            yield


class ComputeQueue:
    """Runs one computation at a time in a thread, so that requests that need none are answered meanwhile."""

    def __init__(self) -> None:
        self._one = anyio.CapacityLimiter(1)
        self._shares = Shares(MOST_QUEUED + 1, QUEUED_OF_A_TENANT, "queued computations")

    async def run(self, tenant: str, computation: Callable[[], T]) -> T:
        """Return what the computation returns. Raises as `Shares.one` does."""
        with self._shares.one(tenant):
            return await anyio.to_thread.run_sync(computation, limiter=self._one)


class Turns:
    """Lets each tenant do `most` things at a time, one after the other; what waits holds up nobody else. Without keys
    nothing waits."""

    def __init__(self, most: int) -> None:
        self._most, self._inside = most, Counter[str]()
        self._free: dict[str, asyncio.Semaphore] = {}

    @asynccontextmanager
    async def one(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn of the tenant, and have it."""
        if tenant == LOCAL:
            yield
            return
        try:
            with _counted(self._inside, tenant):
                async with self._free.setdefault(tenant, asyncio.Semaphore(self._most)):
                    yield
        finally:
            if tenant not in self._inside:
                self._free.pop(tenant, None)


@contextmanager
def _counted(held: Counter[str], tenant: str) -> Iterator[None]:
    held[tenant] += 1
    try:
        yield
    finally:
        held[tenant] -= 1
        if not held[tenant]:
            del held[tenant]
