"""Who waits for news of a job. A change is only a hint to look again: what there is to tell stands in the database."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Changes:
    """Wakes coroutines from other threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self.closing = False

    def tell(self, job_id: str) -> None:
        """From any thread: something about this job has changed."""
        with suppress(RuntimeError):  # the loop has ended, nobody waits any more
            self._loop.call_soon_threadsafe(self._wake, job_id)

    def close(self) -> None:
        """From the loop: everyone stops waiting, for good."""
        self.closing = True
        for job_id in list(self._waiting):
            self._wake(job_id)

    def _wake(self, job_id: str) -> None:
        for waiting in self._waiting.get(job_id, ()):
            waiting.set()

    @contextmanager
    def watching(self, job_id: str) -> Iterator[asyncio.Event]:
        """An event that every change from now on sets; clear it before looking, so that none is missed."""
        changed = asyncio.Event()
        self._waiting[job_id].add(changed)
        try:
            yield changed
        finally:
            self._waiting[job_id].discard(changed)
            if not self._waiting[job_id]:
                del self._waiting[job_id]


async def wait_for(changed: asyncio.Event, timeout_s: float) -> bool:
    """Whether it was set within the time."""
    try:
        async with asyncio.timeout(timeout_s):
            await changed.wait()
    except TimeoutError:
        return False
    return True
