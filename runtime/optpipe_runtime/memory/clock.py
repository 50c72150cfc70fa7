"""`Clock`: the host's clock on CPU; on CUDA, events on the current stream that are read after the step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1e-5, 2e-4


class Clock:
    """Call `mark()` at two moments and `ms(a, b)` later, after `settle()`.

    `require` raises if it is in vain to wait on; it is called again and again while the host waits for a GPU.
    """

    def __init__(self, device: torch.device, require: Callable[[], object] = lambda: None) -> None:
        self._device, self._require = device, require
        self._events = device.type == "cuda"

    def mark(self) -> Any:
        return self.marker()()

    def marker(self) -> Callable[[], Any]:
        """`mark` on what is the current stream now, without looking for it each time."""
        if not self._events:
            return time.perf_counter
        stream = torch.cuda.current_stream(self._device)

        def mark() -> Any:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(stream)
            return event

        return mark

    def settle(self) -> None:
        """Waits for the compute stream: at the end of a step, never inside one."""
        if self._events:
            wait_for(self.mark(), self._require)

    def ms(self, start: Any, end: Any) -> float:
        if not self._events:
            return float(end - start) * 1e3
        for event in (start, end):
            wait_for(event, self._require)  # one on another stream may still be ahead when the compute stream is done
        return float(start.elapsed_time(end))


def wait_for(event: Any, require: Callable[[], object]) -> None:
    """Waits on the host for a CUDA event. `require` is asked while it is ahead, and once more when it has come: what
    was aborted ends like anything else."""
    pause = FIRST_PAUSE_S
    while not event.query():
        require()
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
    require()
