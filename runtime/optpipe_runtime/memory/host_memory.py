"""Host memory that a device copies to and from. For CUDA it is page-locked, near the GPU."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from optpipe.errors import OptPipeError
from optpipe.text import bytes_text, distinct_sizes
from optpipe_runtime.memory import pci

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
    """Raises `OptPipeError` if the system has less. If all of it was used, or locked, the system would end processes,
    this one perhaps."""
    free = free_bytes()
    if free is not None and nbytes > free:
        needed, left = distinct_sizes(nbytes, free)
        raise OptPipeError(f"{needed} of host memory are needed, and {left} are free")


def _locked(nbytes: int, device: torch.device) -> HostMemory:
    torch.cuda.set_device(device)  # else this thread would start CUDA on the first device, too
    stay_near(pci.address(device))
    memory = HostMemory(-1, nbytes)
    memory.lock(device)
    return memory


def stay_near(address: str) -> None:
    """Keeps this thread on the CPUs of the NUMA node of a PCI device, so that pages that it touches first are there:
    CUDA touches them in the thread that locks them. Does nothing where the system does not tell the node, or does not
    let this thread run there."""
    if cpus := pci.cpus_near(address) & os.sched_getaffinity(0):
        with suppress(OSError):
            os.sched_setaffinity(0, cpus)


def free_bytes() -> int | None:
    """What the system can still give this process: its free memory, or less where a control group (a container, a
    job) has a limit. None if it does not tell."""
    limits = [*_control_groups_leave()]
    with suppress(OSError, ValueError, KeyError):
        limits.append(1024 * _table(ROOT / "proc/meminfo")["MemAvailable:"])
    return max(0, min(limits)) if limits else None


def _control_groups_leave() -> list[int]:
    """What each control group of this process leaves (cgroup v2). Pages of files that can be dropped count as free."""
    left: list[int] = []
    with suppress(OSError):
        top, own = ROOT / "sys/fs/cgroup", (ROOT / "proc/self/cgroup").read_text().splitlines()
        for group in (top / line[4:] for line in own if line.startswith("0::/")):
            for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(top))):
                with suppress(OSError, ValueError, KeyError):  # without a limit: "max", or no such file
                    limit, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
                    left.append(limit - used + _table(folder / "memory.stat")["inactive_file"])
    return left


def _table(path: Path) -> dict[str, int]:
    """The first two words of each line."""
    return {words[0]: int(words[1]) for words in map(str.split, path.read_text().splitlines()) if len(words) > 1}


def _locking_limit() -> str:
    """What the system lets a process lock."""
    import resource  # not on Windows

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "" if limit == resource.RLIM_INFINITY else f"; a process may lock {bytes_text(limit)} (ulimit -l)"
