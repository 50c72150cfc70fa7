"""Limits on the memory that the processes of one search hold together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from optpipe.process import process_tree
from optpipe_server.work.cgroup import MIB, Group

SOLVER_SHARE = 7 / 8  # of the limit: the solver watches itself and ends an engine before the whole search is ended
LEAST_MIB = 64
_PAGE = os.sysconf("SC_PAGE_SIZE")


class MemoryLimit(Protocol):
    """The limit of one search."""

    def admit(self, pid: int) -> None:
        """Put the solver's process under the limit, before it does anything."""

    def exceeded(self, mark: str) -> str | None:
        """Return a message if the process tree holds too much; called again and again."""

    def close(self) -> str | None:
        """After the processes have ended: return a message if the limit ended them."""


def memory_limit(memory_mib: int | None, groups: Path | None) -> MemoryLimit:
    """Return a limit that the kernel keeps if there is a folder for cgroups, else one that is polled."""
    if memory_mib is None:
        return Unlimited()
    return CgroupLimit(memory_mib, groups) if groups else PolledLimit(memory_mib)


def solver_memory_mib(memory_mib: int | None) -> int | None:
    """Return the limit that the solver itself is given."""
    return None if memory_mib is None else max(LEAST_MIB, int(SOLVER_SHARE * memory_mib))


class Unlimited:
    """No limit."""

    def admit(self, pid: int) -> None:
        pass

    def exceeded(self, mark: str) -> str | None:
        return None

    def close(self) -> str | None:
        return None


class PolledLimit(Unlimited):
    """Looks at the resident memory of the processes of a tree; pages that they share count for each of them.

    A limit on the address space would not do: CP-SAT reserves many times what it uses.
    """

    def __init__(self, memory_mib: int) -> None:
        self._memory_mib = memory_mib

    def exceeded(self, mark: str) -> str | None:
        held = sum(resident_bytes(pid) for pid in process_tree.members(mark))
        if held <= self._memory_mib * MIB:
            return None
        return f"the solver held {held // MIB} MiB, and memory_mib is {self._memory_mib}"


class CgroupLimit(Unlimited):
    """Has the kernel keep a cgroup within the limit."""

    def __init__(self, memory_mib: int, groups: Path) -> None:
        self._memory_mib, self._group = memory_mib, Group(groups, memory_mib)

    def admit(self, pid: int) -> None:
        self._group.admit(pid)

    def close(self) -> str | None:
        killed = self._group.oom_killed
        self._group.remove()
        return f"the solver needed more memory than memory_mib, which is {self._memory_mib}" if killed else None


def resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0
