"""Host memory that a device copies to and from: `HostPool` has pages of it for offloaded activations, reached over a
link (`OnHost`). For CUDA it is page-locked, near the GPU."""

from __future__ import annotations

import mmap
import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import torch
from torch import Tensor

from optpipe.errors import OptPipeError
from optpipe.text import bytes_text, distinct_sizes
from optpipe_runtime.memory import pci
from optpipe_runtime.memory.engines import CopyEngine, Handle, copy_all
from optpipe_runtime.memory.link import Link

ROOT = Path("/")
ALL_CONTEXTS = 1  # cudaHostRegisterPortable


class HostMemory(mmap.mmap):
    """`HostMemory(-1, nbytes)`: zeros of exactly that many bytes. torch's own pinned memory comes in powers of two, up
    to twice as much.

    It is freed behind its last tensor, when copies that may still be under way have ended. Forks of the process, such
    as a data loader's workers, share it: a private page that is locked would be copied on write, and the device would
    then use the wrong one.
    """

    _unlock: Sequence[Callable[[], object]] = ()  # in turn

    def tensor(self) -> Tensor:
        return torch.frombuffer(self, dtype=torch.uint8)

    def lock(self, device: torch.device) -> None:
        """Page-locks the memory, so that a CUDA device can copy asynchronously."""
        driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = self.tensor().data_ptr()
        torch.cuda.check_error(driver.cudaHostRegister(address, len(self), ALL_CONTEXTS))
        self._unlock = (
            partial(torch.cuda.set_device, device),  # else a new thread would start CUDA on the first one, too
            partial(torch.cuda.synchronize, device),
            partial(driver.cudaHostUnregister, address),
        )

    def __del__(self) -> None:
        # In a thread, which keeps the memory meanwhile: a device that waits for a rank that is gone never ends. When
        # the interpreter ends, no thread starts any more, and the memory ends with the process.
        if self._unlock and not sys.is_finalizing():
            Thread(target=_in_turn, args=(self._unlock, self), name="optpipe-unlock", daemon=True).start()


def _in_turn(calls: Sequence[Callable[[], object]], _: HostMemory) -> None:
    for call in calls:
        call()


def allocate(nbytes: int, device: torch.device) -> HostMemory:
    """Host memory for copies of `device`, from any thread. Raises `OptPipeError` if the system does not give it."""
    require_free(nbytes)
    try:
        if device.type != "cuda":
            return HostMemory(-1, nbytes)
        # In a thread of its own: an error of the CUDA runtime stays with the thread in which it came up, and would be
        # reported by the next kernel that is launched there. And a thread can be placed near the GPU.
        with ThreadPoolExecutor(1, "optpipe-lock") as beside:
            return beside.submit(_locked, nbytes, device).result()
    except (MemoryError, OSError, RuntimeError, OverflowError) as error:
        what, limit = ("page-locked", _locking_limit()) if device.type == "cuda" else ("allocated", "")
        raise OptPipeError(f"{bytes_text(nbytes)} of host memory could not be {what}: {error}{limit}") from None


def require_free(nbytes: int) -> None:
    """Raises `OptPipeError` if the system has less: with all of it used or locked, it would end processes."""
    free = free_bytes()
    if free is not None and nbytes > free:
        needed, left = distinct_sizes(nbytes, free)
        raise OptPipeError(f"{needed} of host memory are needed, and {left} are free")


def _locked(nbytes: int, device: torch.device) -> HostMemory:
    torch.cuda.set_device(device)  # else this thread would start CUDA on the first device, too
    # On the CPUs of the GPU's NUMA node, if the system reports them: CUDA touches pages first in the thread that locks
    # them, and there they are.
    if cpus := pci.cpus_near(pci.address(device)) & os.sched_getaffinity(0):
        with suppress(OSError):
            os.sched_setaffinity(0, cpus)
    memory = HostMemory(-1, nbytes)
    memory.lock(device)
    return memory


def free_bytes() -> int | None:
    """What the system can still give this process: its free memory, or less where a control group (cgroup v2, of a
    container or a job) has a limit; pages of files that can be dropped count as free. None if it does not report it."""
    left: list[int] = []
    with suppress(OSError):
        top, own = ROOT / "sys/fs/cgroup", (ROOT / "proc/self/cgroup").read_text().splitlines()
        for group in (top / line[4:] for line in own if line.startswith("0::/")):
            for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(top))):
                with suppress(OSError, ValueError, KeyError):  # without a limit: "max", or no such file
                    limit, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
                    left.append(limit - used + _table(folder / "memory.stat")["inactive_file"])
    with suppress(OSError, ValueError, KeyError):
        left.append(1024 * _table(ROOT / "proc/meminfo")["MemAvailable:"])
    return max(0, min(left)) if left else None


def _table(path: Path) -> dict[str, int]:
    """The first two words of each line."""
    return {words[0]: int(words[1]) for words in map(str.split, path.read_text().splitlines()) if len(words) > 1}


def _locking_limit() -> str:
    """What the system lets a process lock."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "" if limit == resource.RLIM_INFINITY else f"; a process may lock {bytes_text(limit)} (ulimit -l)"


# Bytes. On CUDA a page is so large that copying page by page loses little: 2 % on one H100 (docs/gpu.md).
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
        """Lays the pieces one after the other over the pages: yields each stretch's place on a page, and its bytes."""
        pages, page = iter(self._pages), torch.empty(0)
        for piece in pieces:
            while len(piece):
                page = page if len(page) else next(pages)
                n = min(len(page), len(piece))
                yield page[:n], piece[:n]
                page, piece = page[n:], piece[n:]
