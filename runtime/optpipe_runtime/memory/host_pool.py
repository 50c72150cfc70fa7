"""Host memory for offloaded activations."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from optpipe.errors import OptPipeError
from optpipe_runtime.memory.engines import CopyEngine, Handle, copy_all
from optpipe_runtime.memory.link import Link

# Bytes. On CUDA a page is so large that copying page by page should lose little (not measured).
PAGE = {"cpu": 1 << 20, "cuda": 1 << 23}


class HostPool:
    """Host memory for offloaded bytes, in pages of one size. What is given back fits whatever comes next, so the need
    of a program is known before it runs. `reserve` allocates it once, page-locked for CUDA.

    `peak_bytes` is the most in use since `start_step`, in whole pages. Raises `OptPipeError` if `limit` bytes are not
    enough.
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
        """The bytes of the pages that `nbytes` take."""
        return -(-nbytes // self._page) * self._page

    def take(self, nbytes: int) -> list[Tensor]:
        """Pages for `nbytes`, as tensors of bytes. Return them with `give`."""
        self.reserve(self._used + self.size(nbytes))
        count = self.size(nbytes) // self._page
        pages = [self._free.pop() for _ in range(count)]
        self.peak_bytes = max(self.peak_bytes, self._used)
        return pages

    def give(self, pages: Sequence[Tensor]) -> None:
        self._free += pages

    def reserve(self, nbytes: int) -> None:
        """Allocates now what is missing for `nbytes` in use at once, so that no step has to."""
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

    It is freed with its last tensor. Forks of the process, such as a data loader's workers, share it: a private page
    that is locked would be copied on write, and the device would then use the wrong one.
    """

    _unlock: Callable[[], object] | None = None

    def tensor(self) -> Tensor:
        return torch.frombuffer(self, dtype=torch.uint8)

    def lock(self, device: torch.device) -> None:
        """Page-locks the memory, so that a CUDA device can copy asynchronously. Does nothing on CPU."""
        if device.type == "cuda":
            driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            all_contexts = 1
            torch.cuda.check_error(driver.cudaHostRegister(self.tensor().data_ptr(), len(self), all_contexts))
            self._unlock = partial(_unlock, driver, device, self.tensor().data_ptr())

    def __del__(self) -> None:
        if self._unlock is not None:
            self._unlock()


def _unlock(driver: Any, device: torch.device, address: int) -> None:
    torch.cuda.synchronize(device)  # a copy may still be under way
    driver.cudaHostUnregister(address)


class OnHost:
    """A `Destination`: pages of the host pool, reached over the link."""

    def __init__(self, link: Link, pool: HostPool) -> None:
        self._link, self._pool = link, pool
        self._pages: list[Tensor] = []

    def take_out(self, pieces: Sequence[Tensor]) -> Sequence[Handle]:
        self._pages = self._pool.take(sum(piece.nbytes for piece in pieces))
        return self._start(self._link.out, [(place, stretch) for place, stretch in self._places(pieces)])

    def bring_back(self, targets: Sequence[Tensor]) -> Sequence[Handle]:
        return self._start(self._link.back, [(stretch, place) for place, stretch in self._places(targets)])

    def release(self) -> None:
        self._pool.give(self._pages)

    def _start(self, engine: CopyEngine, copies: list[tuple[Tensor, Tensor]]) -> Sequence[Handle]:
        return [engine.run(partial(copy_all, copies))] if copies else ()

    def _places(self, pieces: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Lays the pieces one after the other over the pages: yields each stretch that lies on one page, as its place
        there and the piece's bytes."""
        pages, page = iter(self._pages), torch.empty(0)
        for piece in pieces:
            while len(piece):
                page = page if len(page) else next(pages)
                n = min(len(page), len(piece))
                yield page[:n], piece[:n]
                page, piece = page[n:], piece[n:]


class Nowhere:
    """A `Destination` that keeps nothing: shows what a drop frees."""

    def take_out(self, pieces: Sequence[Tensor]) -> Sequence[Handle]:
        return ()

    def bring_back(self, targets: Sequence[Tensor]) -> Sequence[Handle]:
        raise AssertionError("nothing can come back from here")

    def release(self) -> None:
        pass
