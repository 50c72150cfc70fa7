"""`Clock`: the host's clock on CPU; on CUDA, events on the current stream that are read after the step."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Call `mark()` at two moments and `ms(a, b)` later, after `settle()`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = device.type == "cuda"

    def mark(self) -> Any:
        if not self._events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Waits for the compute stream: at the end of a step, never inside one."""
        if self._events:
            torch.cuda.current_stream(self._device).synchronize()

    def ms(self, start: Any, end: Any) -> float:
        if not self._events:
            return float(end - start) * 1e3
        for event in (start, end):
            event.synchronize()  # an event on another stream may still be ahead when the compute stream is done
        return float(start.elapsed_time(end))
