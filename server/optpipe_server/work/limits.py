"""What a search may take: threads, and the memory that its processes hold together."""

from __future__ import annotations

import threading

import psutil

from optpipe.process import process_tree

MIB = 2**20
SOLVER_SHARE = 7 / 8  # of the limit: the solver watches itself and ends an engine before the whole search is ended
LEAST_MIB = 64


def solver_memory_mib(memory_mib: int | None) -> int | None:
    """Return the limit that the solver itself is given."""
    return None if memory_mib is None else max(LEAST_MIB, int(SOLVER_SHARE * memory_mib))


def memory_exceeded(mark: str, memory_mib: int | None) -> str | None:
    """Return a message if the process tree holds more than the limit; None is no limit.

    Pages that processes share count for each of them. A limit on the address space would not do: CP-SAT reserves many
    times what it uses.
    """
    if memory_mib is None:
        return None
    held = sum(resident_bytes(pid) for pid in process_tree.members(mark))
    return f"the solver held {held // MIB} MiB, and memory_mib is {memory_mib}" if held > memory_mib * MIB else None


def resident_bytes(pid: int) -> int:
    """Return what a process holds in memory; 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


class ThreadBudget:
    """Shares threads among the searches that run at a time.

    A search that runs alone gets all threads but one for each free slot; every search gets at least one.
    """

    def __init__(self, total: int, slots: int) -> None:
        self._left, self._slots = total, slots
        self._lock = threading.Lock()

    def take(self, most: int | None = None) -> int:
        """Return the threads for one more search, which can use `most`."""
        with self._lock:
            self._slots -= 1
            taken = max(1, min(self._left - self._slots, self._left if most is None else most))
            self._left -= taken
            return taken

    def give_back(self, taken: int) -> None:
        with self._lock:
            self._slots += 1
            self._left += taken
