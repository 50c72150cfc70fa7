"""How much memory the processes of one search may hold together, and what becomes of those that hold more."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from optpipe.process import family
from optpipe_server.work.cgroup import MIB, Group

TOLD = 7 / 8  # of its room: a solver that watches itself ends an engine before all of it is ended
LEAST_MIB = 64
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Room(Protocol):
    """What one search may hold."""

    def admit(self, pid: int) -> None:
        """The solver's process, before it does anything."""

    def exceeded(self, mark: str) -> str | None:
        """What is wrong, where the family holds too much; looked at again and again."""

    def close(self) -> str | None:
        """After its processes have ended: what was wrong, where they were ended for it."""


def room(memory_mib: int | None, groups: Path | None) -> Room:
    """By the kernel where there is a folder for `groups`, else by looking."""
    if memory_mib is None:
        return Anything()
    return Kept(memory_mib, groups) if groups else Watched(memory_mib)


def told_mib(memory_mib: int | None) -> int | None:
    """What a solver is told to keep within."""
    return None if memory_mib is None else max(LEAST_MIB, int(TOLD * memory_mib))


class Anything:
    """No limit."""

    def admit(self, pid: int) -> None:
        pass

    def exceeded(self, mark: str) -> str | None:
        return None

    def close(self) -> str | None:
        return None


class Watched(Anything):
    """By the resident memory of the family's processes; pages that they share count for each.

    Not by a limit on their address space: CP-SAT reserves many times what it uses.
    """

    def __init__(self, memory_mib: int) -> None:
        self._memory_mib = memory_mib

    def exceeded(self, mark: str) -> str | None:
        held = sum(resident_bytes(pid) for pid in family.members(mark))
        return (
            None
            if held <= self._memory_mib * MIB
            else f"the solver held {held // MIB} MiB, and memory_mib is {self._memory_mib}"
        )


class Kept(Anything):
    """By a group of the kernel's."""

    def __init__(self, memory_mib: int, groups: Path) -> None:
        self._memory_mib, self._group = memory_mib, Group(groups, memory_mib)

    def admit(self, pid: int) -> None:
        self._group.admit(pid)

    def close(self) -> str | None:
        killed = self._group.killed
        self._group.remove()
        return f"the solver needed more memory than memory_mib, which is {self._memory_mib}" if killed else None


def resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0
