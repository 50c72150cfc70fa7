"""How much of what all tenants share one of them may have at a time. More is refused (`Shares`) or waits (`Turns`)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from optpipe_server.http.replies import ReplyError
from optpipe_server.settings import LOCAL


class Shares:
    """Counts what tenants have, and refuses more than `most` of it; without keys there is only one, who may have all.
    Used from the event loop only."""

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what, self._held = most, what, Counter[str]()

    @contextmanager
    def one(self, tenant: str) -> Iterator[None]:
        """Hold one more for the tenant. Raises `ReplyError` (429) if it has its share."""
        if tenant != LOCAL and self._held[tenant] >= self._most:
            raise ReplyError(429, f"Your tenant has {self._most} {self._what} already.", {"Retry-After": "5"})
        with _counted(self._held, tenant):
            yield


class Turns:
    """Lets each tenant do `most` things at a time, one after the other; what waits holds up nobody else. Without keys
    nothing waits. Used from one event loop only."""

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
