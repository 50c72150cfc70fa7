"""Host memory for offloaded activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from threading import Lock

import torch
from torch import Tensor

from optpipe.errors import OptPipeError
from optpipe.text import distinct_sizes
from optpipe_runtime.memory.engines import CopyEngine, Handle, copy_all
from optpipe_runtime.memory.host_memory import allocate, require_free
from optpipe_runtime.memory.link import Link

# Bytes. On CUDA a page is so large that copying page by page should lose little (not measured).
PAGE = {"cpu": 1 << 20, "cuda": 1 << 23}
PIECE = 1 << 28  # bytes that are locked at once: CUDA may launch no kernel meanwhile (not measured)


class HostPool:
    """Host memory for offloaded bytes, in pages of one size. What is given back fits whatever comes next, so the need
    of a program is known before it runs. `reserve` allocates it once, page-locked for CUDA, from any thread: a running
    step waits for it only if it needs pages that are not there.

    `peak_bytes` is the most in use since `start_step`, in whole pages. Raises `OptPipeError` if `limit` bytes are not
    enough, or if the system does not give them.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self._device, self._page = device, PAGE[device.type]
        self.limit = limit
        self._free: list[Tensor] = []
        self._allocated = 0
        self._pages, self._growing = Lock(), Lock()  # `_pages` for both of these, for moments
        self.peak_bytes = 0

    def start_step(self) -> None:
        self.peak_bytes = self._used

    @property
    def _used(self) -> int:
        with self._pages:
            return self._allocated - self._page * len(self._free)

    def size(self, nbytes: int) -> int:
        """The bytes of the pages that `nbytes` take."""
        return -(-nbytes // self._page) * self._page

    def take(self, nbytes: int) -> list[Tensor]:
        """Pages for `nbytes`, as tensors of bytes. Return them with `give`."""
        count = self.size(nbytes) // self._page
        if count > len(self._free):
            self.reserve(self._used + self.size(nbytes))
        with self._pages:
            pages = [self._free.pop() for _ in range(count)]
        self.peak_bytes = max(self.peak_bytes, self._used)
        return pages

    def give(self, pages: Sequence[Tensor]) -> None:
        with self._pages:
            self._free += pages

    def reserve(self, nbytes: int) -> None:
        """Allocates now what is missing for `nbytes` in use at once, so that no step has to."""
        with self._growing:
            missing = self.size(nbytes) - self._allocated
            if missing <= 0:
                return
            if self.limit is not None and self._allocated + missing > self.limit:
                limit, held, more = distinct_sizes(self.limit, self._allocated, missing)
                raise OptPipeError(f"host_memory_bytes = {limit}: {held} are allocated and {more} more are needed")
            require_free(missing)
            for begin in range(0, missing, PIECE):
                memory = allocate(min(PIECE, missing - begin), self._device).tensor()
                with self._pages:
                    self._free += [memory[k : k + self._page] for k in range(0, len(memory), self._page)]
                    self._allocated += len(memory)


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
