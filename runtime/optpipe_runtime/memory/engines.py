"""`Clock`, and what runs transfers beside compute.

On CUDA a copy runs on a side stream between pinned host memory and the device, ordered by events. On CPU a thread
copies between two places of the same memory. Both start a copy only after what the host has issued before it, and both
are asynchronous. So the code above them is the same, and is tested without a GPU.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


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


class Handle(Protocol):
    """A transfer under way."""

    start: Any
    end: Any  # marks of `Clock`: when it ran, to be read after the step

    def wait(self) -> None:
        """Makes everything that is computed or freed from here on come after the transfer."""


class CopyEngine(Protocol):
    """Runs transfers one after the other, in the order of the calls."""

    def run(self, work: Callable[[], object]) -> Handle: ...

    def close(self) -> None: ...


class Destination(Protocol):
    """Where one part of an activation is kept while it is off the device, and how it gets there."""

    def take_out(self, pieces: Sequence[Tensor]) -> Sequence[Handle]:
        """Starts to copy the bytes off the device."""

    def bring_back(self, targets: Sequence[Tensor]) -> Sequence[Handle]:
        """Starts to copy them back, into other device memory."""

    def release(self) -> None:
        """The bytes are back: frees the place."""


class _ThreadHandle:
    """A transfer of `ThreadEngine`: an event, and the error if it failed."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.start: Any = None
        self.end: Any = None
        self.error: BaseException | None = None

    def wait(self) -> None:
        self.event.wait()
        if self.error is not None:
            raise self.error


class ThreadEngine:
    """The CPU's engine: one thread, first in, first out. Transfers after one that failed fail with the same error,
    because they rely on the order."""

    def __init__(self, mark: Callable[[], Any] = time.perf_counter) -> None:
        self._mark = mark
        self._jobs: queue.SimpleQueue[tuple[Callable[[], object], _ThreadHandle] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="optpipe-copy", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], object]) -> _ThreadHandle:
        handle = _ThreadHandle()
        self._jobs.put((work, handle))
        return handle

    def _work(self) -> None:
        failure: BaseException | None = None
        while (job := self._jobs.get()) is not None:
            work, handle = job
            handle.start = self._mark()
            try:
                if failure is None:
                    work()
            except BaseException as error:
                failure = error
            handle.error = failure
            handle.end = self._mark()
            del job, work  # before the event: a drop right after it must find no reference left
            handle.event.set()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()


class StreamEngine:
    """CUDA's engine: a side stream that waits for the compute issued before. Never blocks the host."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._clock = device, Clock(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], object]) -> _StreamHandle:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            start = self._clock.mark()
            work()
            return _StreamHandle(start, self._clock.mark(), self._device)

    def close(self) -> None:
        self._stream.synchronize()


class _StreamHandle:
    def __init__(self, start: Any, end: Any, device: torch.device) -> None:
        self.start, self.end, self._device = start, end, device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.end)


def copy_engine(device: torch.device) -> CopyEngine:
    return StreamEngine(device) if device.type == "cuda" else ThreadEngine()


def copy_all(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copies into the first tensor of each pair from the second. On CUDA the copies are only issued."""
    for target, source in copies:
        target.copy_(source, non_blocking=True)
