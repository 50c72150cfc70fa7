"""Where offloaded activations go, and who carries them: the host pool, and an engine for what runs beside compute, behind one small
protocol.

On CUDA a copy runs on a side stream between pinned host memory and the device, ordered by events; on CPU a thread copies between two
pools of the same memory. Both begin a copy only after what the host has issued before it, and both are asynchronous, so the state machine
above them is the same and is tested without a GPU.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from optpipe.errors import OptPipeError
from optpipe_runtime.clock import Clock


class Ticket(Protocol):
    """A transfer under way."""

    start: Any
    end: Any  # marks of `Clock`: when it ran, to be read after the step

    def wait(self) -> None:
        """Whatever is computed or freed from here on, comes after the transfer."""


class Engine(Protocol):
    """Runs transfers on one lane, in the order of the calls."""

    def run(self, work: Callable[[], object]) -> Ticket: ...

    def close(self) -> None: ...


class Carrier(Protocol):
    """Where one part of an activation waits while it is away, and how it gets there."""

    def away(self, pieces: Sequence[Tensor]) -> Sequence[Ticket]:
        """Starts to take the bytes out."""

    def back(self, homes: Sequence[Tensor]) -> Sequence[Ticket]:
        """Starts to bring them back, into other memory."""

    def end(self) -> None:
        """They are back."""


class _Done:
    """A transfer by the thread: an event, and the error where it failed."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.start = self.end = 0.0
        self.error: BaseException | None = None

    def wait(self) -> None:
        self.event.wait()
        if self.error is not None:
            raise self.error


class ThreadEngine:
    """The CPU's engine: one thread, first in, first out."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], object], _Done] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="optpipe-copy", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], object]) -> _Done:
        done = _Done()
        self._jobs.put((work, done))
        return done

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, done = job
            done.start = time.perf_counter()
            try:
                work()
            except BaseException as error:
                done.error = error
            done.end = time.perf_counter()
            del job, work  # before anyone is told: a drop right after must find no reference left
            done.event.set()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()


class StreamEngine:
    """CUDA's engine: a side stream that waits for the compute stream where a transfer is issued. Never blocks the host. Not measured."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._clock = device, Clock(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], object]) -> _StreamTicket:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            start = self._clock.mark()
            work()
            return _StreamTicket(start, self._clock.mark(), self._device)

    def close(self) -> None:
        self._stream.synchronize()


class _StreamTicket:
    def __init__(self, start: Any, end: Any, device: torch.device) -> None:
        self.start, self.end, self._device = start, end, device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.end)


def engine(device: torch.device) -> Engine:
    return StreamEngine(device) if device.type == "cuda" else ThreadEngine()


class Link:
    """A device's way to the host: one lane where it is half duplex, one a direction where it is full duplex."""

    def __init__(self, device: torch.device, full_duplex: bool) -> None:
        self.down = engine(device)
        self.up = engine(device) if full_duplex else self.down

    def close(self) -> None:
        for lane in {id(lane): lane for lane in (self.down, self.up)}.values():
            lane.close()


class HostPool:
    """Host slots for offloaded bytes, allocated once and reused; pinned for CUDA, where torch rounds them up to powers of two.

    `peak_bytes` is the most in use since `start_step`. Raises `OptPipeError` where `limit` bytes are not enough.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self._pinned = device.type == "cuda"
        self.limit = limit
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._allocated = 0
        self._used = 0
        self.peak_bytes = 0

    def start_step(self) -> None:
        self.peak_bytes = self._used

    def size(self, nbytes: int) -> int:
        """What a slot for `nbytes` really takes."""
        return 1 << (nbytes - 1).bit_length() if self._pinned and nbytes else nbytes

    def take(self, nbytes: int) -> Tensor:
        """A slot of at least `nbytes`, a tensor of bytes; `give` it back."""
        size = self.size(nbytes)
        slot = self._free[size].pop() if self._free[size] else self._allocate(size)
        self._used += size
        self.peak_bytes = max(self.peak_bytes, self._used)
        return slot

    def give(self, slot: Tensor) -> None:
        self._used -= slot.numel()
        self._free[slot.numel()].append(slot)

    def reserve(self, nbytes: int, count: int) -> None:
        """Allocates now what taking `count` slots at once will need, so that no step has to."""
        size = self.size(nbytes)
        while len(self._free[size]) < count:
            self._free[size].append(self._allocate(size))

    def _allocate(self, size: int) -> Tensor:
        for slots in self._free.values():  # idle slots of other sizes make room
            while slots and self._lacks(size):
                self._allocated -= slots.pop().numel()
        if self._lacks(size):
            raise OptPipeError(f"host_memory_bytes = {self.limit}: {self._allocated} bytes are in use and {size} more are needed")
        self._allocated += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def _lacks(self, size: int) -> bool:
        return self.limit is not None and self._allocated + size > self.limit


class OnHost:
    """A slot of the host pool, reached over the link: a `Carrier`."""

    def __init__(self, link: Link, pool: HostPool) -> None:
        self._link, self._pool = link, pool
        self._slot: Tensor | None = None

    def away(self, pieces: Sequence[Tensor]) -> Sequence[Ticket]:
        self._slot = self._pool.take(sum(piece.nbytes for piece in pieces))
        return [self._link.down.run(partial(place.copy_, piece, non_blocking=True)) for place, piece in self._places(pieces)]

    def back(self, homes: Sequence[Tensor]) -> Sequence[Ticket]:
        return [self._link.up.run(partial(home.copy_, place, non_blocking=True)) for place, home in self._places(homes)]

    def end(self) -> None:
        assert self._slot is not None
        self._pool.give(self._slot)

    def _places(self, pieces: Sequence[Tensor]) -> Iterable[tuple[Tensor, Tensor]]:
        """Each piece with its place in the slot."""
        assert self._slot is not None
        offset = 0
        for piece in pieces:
            yield self._slot[offset : offset + piece.nbytes], piece
            offset += piece.nbytes


class Nowhere:
    """A `Carrier` that takes nothing along: to see what a drop frees."""

    def away(self, pieces: Sequence[Tensor]) -> Sequence[Ticket]:
        return ()

    def back(self, homes: Sequence[Tensor]) -> Sequence[Ticket]:
        raise AssertionError("nothing comes back from nowhere")

    def end(self) -> None:
        pass
