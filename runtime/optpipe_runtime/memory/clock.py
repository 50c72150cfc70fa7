"""`Clock`: the host's clock on CPU; on CUDA, events on the current stream that are read after the step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class Clock:
    """Call `mark()` at two moments and `ms(a, b)` later, after `settle()`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._events = device, device.type == "cuda"

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
            self.mark().synchronize()

    def ms(self, start: Any, end: Any) -> float:
        if not self._events:
            return float(end - start) * 1e3
        for event in (start, end):
            event.synchronize()  # one on another stream may still be ahead when the compute stream is done
        return float(start.elapsed_time(end))
