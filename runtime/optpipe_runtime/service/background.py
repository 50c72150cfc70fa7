"""`Background`: a daemon thread with an event loop, which does all waiting for a service beside the training."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Background:
    """Runs `_main` in its thread, from `_begin` on until that ends."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    async def _main(self) -> None:
        raise NotImplementedError

    def _begin(self) -> None:
        self._thread.start()

    def _in_thread(self, call: Callable[..., object], *arguments: Any) -> None:
        """Schedules a call in the thread's loop, without waiting."""
        with suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(call, *arguments)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())
