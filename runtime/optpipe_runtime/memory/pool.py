"""Where offloaded activations go, and who carries them: the host pool, and an engine for what runs beside compute,
behind one small protocol.

On CUDA a copy runs on a side stream between pinned host memory and the device, ordered by events; on CPU a thread
copies between two pools of the same memory. Both begin a copy only after what the host has issued before it, and both
are asynchronous, so the state machine above them is the same and is tested without a GPU.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from optpipe.errors import OptPipeError
from optpipe.model.ops import Op
from optpipe_runtime.measure.clock import Clock
from optpipe_runtime.memory.turns import Token, Turns

PAGE = {
    "cpu": 1 << 20,
    "cuda": 1 << 23,
}  # bytes; on CUDA large enough that copying page by page loses little (not measured)


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
        self.start: Any = None
        self.end: Any = None
        self.error: BaseException | None = None

    def wait(self) -> None:
        self.event.wait()
        if self.error is not None:
            raise self.error


class ThreadEngine:
    """The CPU's engine: one thread, first in, first out. What comes after a transfer that failed fails with it: order
    is what it is for."""

    def __init__(self, mark: Callable[[], Any] = time.perf_counter) -> None:
        self._mark = mark
        self._jobs: queue.SimpleQueue[tuple[Callable[[], object], _Done] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="optpipe-copy", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], object]) -> _Done:
        done = _Done()
        self._jobs.put((work, done))
        return done

    def _work(self) -> None:
        failure: BaseException | None = None
        while (job := self._jobs.get()) is not None:
            work, done = job
            done.start = self._mark()
            try:
                if failure is None:
                    work()
            except BaseException as error:
                failure = error
            done.error = failure
            done.end = self._mark()
            del job, work  # before anyone is told: a drop right after must find no reference left
            done.event.set()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()


class StreamEngine:
    """CUDA's engine: a side stream that waits for the compute stream where a transfer is issued. Never blocks the host.
    Not measured."""

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
    """A device's way to the host: one lane where it is half duplex, one a direction where it is full duplex. Where
    ranks share it, `tokens` has one for each lane."""

    def __init__(self, device: torch.device, full_duplex: bool, tokens: Sequence[Token] = ()) -> None:
        self.down = engine(device)
        self.up = engine(device) if full_duplex else self.down
        self._shared = tuple(zip(tokens, self._lanes, strict=True)) if tokens else ()

    @property
    def _lanes(self) -> tuple[Engine, ...]:
        return (self.down,) if self.up is self.down else (self.down, self.up)

    def start_step(self, turns: Sequence[Turns | None]) -> None:
        """`turns`: this step's, lane by lane."""
        for (token, lane), found in zip(self._shared, turns, strict=True):
            if found is not None:
                token.start_step(found, lane)

    @contextmanager
    def turn(self, op: Op) -> Iterator[None]:
        """What `op` transfers in here goes over a shared link when it is its turn."""
        with ExitStack() as stack:
            for token, lane in self._shared:
                stack.enter_context(token.turn(op, lane))
            yield

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()


class HostPool:
    """Host memory for offloaded bytes, in pages of one size: whatever is given back fits whatever comes next, so what a
    program needs is known before it runs. Allocated once, by `reserve`; page-locked for CUDA.

    `peak_bytes` is the most in use since `start_step`, in whole pages. Raises `OptPipeError` where `limit` bytes are
    not enough.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self._device, self._page = device, PAGE[device.type]
        self.limit = limit
        self._free: list[Tensor] = []
        self._allocated = 0
        self.peak_bytes = 0

    def start_step(self) -> None:
        self.peak_bytes = self._used

    @property
    def _used(self) -> int:
        return self._allocated - self._page * len(self._free)

    def size(self, nbytes: int) -> int:
        """What `nbytes` really take."""
        return -(-nbytes // self._page) * self._page

    def take(self, nbytes: int) -> list[Tensor]:
        """Pages for `nbytes`, tensors of bytes; `give` them back."""
        self.reserve(self._used + self.size(nbytes))
        count = self.size(nbytes) // self._page
        pages = [self._free.pop() for _ in range(count)]
        self.peak_bytes = max(self.peak_bytes, self._used)
        return pages

    def give(self, pages: Sequence[Tensor]) -> None:
        self._free += pages

    def reserve(self, nbytes: int) -> None:
        """Allocates now what is missing where so many bytes are in use at once, so that no step has to."""
        missing = self.size(nbytes) - self._allocated
        if missing <= 0:
            return
        if self.limit is not None and self._allocated + missing > self.limit:
            raise OptPipeError(
                f"host_memory_bytes = {self.limit}: {self._allocated} bytes are allocated and {missing} more are needed"
            )
        memory = HostMemory(-1, missing)
        memory.lock(self._device)
        self._free += [memory.tensor()[k : k + self._page] for k in range(0, missing, self._page)]
        self._allocated += missing


class HostMemory(mmap.mmap):
    """`HostMemory(-1, nbytes)`: zeros of exactly that many bytes. torch's own pinned memory comes in powers of two, up
    to twice as much.

    It goes when its last tensor does. Shared with forks of the process, such as a data loader's workers: a private page
    that is locked would be copied away under the device's hands.
    """

    _unlock: Callable[[], object] | None = None

    def tensor(self) -> Tensor:
        return torch.frombuffer(self, dtype=torch.uint8)

    def lock(self, device: torch.device) -> None:
        """Lets a CUDA device copy from and to it beside the host; nothing on CPU."""
        if device.type == "cuda":
            driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(
                driver.cudaHostRegister(self.tensor().data_ptr(), len(self), 1)
            )  # 1: for all contexts
            self._unlock = partial(_unlock, driver, device, self.tensor().data_ptr())

    def __del__(self) -> None:
        if self._unlock is not None:
            self._unlock()


def _unlock(driver: Any, device: torch.device, address: int) -> None:
    torch.cuda.synchronize(device)  # a copy may still be under way
    driver.cudaHostUnregister(address)


class OnHost:
    """Pages of the host pool, reached over the link: a `Carrier`."""

    def __init__(self, link: Link, pool: HostPool) -> None:
        self._link, self._pool = link, pool
        self._pages: list[Tensor] = []

    def away(self, pieces: Sequence[Tensor]) -> Sequence[Ticket]:
        self._pages = self._pool.take(sum(piece.nbytes for piece in pieces))
        return self._start(self._link.down, [(place, stretch) for place, stretch in self._places(pieces)])

    def back(self, homes: Sequence[Tensor]) -> Sequence[Ticket]:
        return self._start(self._link.up, [(stretch, place) for place, stretch in self._places(homes)])

    def end(self) -> None:
        self._pool.give(self._pages)

    def _start(self, lane: Engine, copies: list[tuple[Tensor, Tensor]]) -> Sequence[Ticket]:
        return [lane.run(partial(copy_all, copies))] if copies else ()

    def _places(self, pieces: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The pieces one after the other over the pages: each stretch that lies on one page, and its place there."""
        pages, page = iter(self._pages), torch.empty(0)
        for piece in pieces:
            while len(piece):
                page = page if len(page) else next(pages)
                n = min(len(page), len(piece))
                yield page[:n], piece[:n]
                page, piece = page[n:], piece[n:]


def copy_all(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Each to the first from the second of its two; on CUDA only issued."""
    for to, source in copies:
        to.copy_(source, non_blocking=True)


class Nowhere:
    """A `Carrier` that takes nothing along: to see what a drop frees."""

    def away(self, pieces: Sequence[Tensor]) -> Sequence[Ticket]:
        return ()

    def back(self, homes: Sequence[Tensor]) -> Sequence[Ticket]:
        raise AssertionError("nothing comes back from nowhere")

    def end(self) -> None:
        pass
