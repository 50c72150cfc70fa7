"""How much memory the processes of one search may hold together, and what becomes of those that hold more."""

from __future__ import annotations

import os

from optpipe import family

MIB = 2**20
TOLD = 7 / 8  # of its room: a solver that watches itself ends an engine before all of it is ended
LEAST_MIB = 64
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Room:
    """By the resident memory of a family of processes, looked at again and again; pages that they share count for each.

    Not by a limit on their address space: CP-SAT reserves many times what it uses.
    """

    def __init__(self, memory_mib: int | None) -> None:
        self.memory_mib = memory_mib

    @property
    def told_mib(self) -> int | None:
        """What the solver is told to keep within."""
        return None if self.memory_mib is None else max(LEAST_MIB, int(TOLD * self.memory_mib))

    def admit(self, pid: int) -> None:
        """Before the process does anything."""

    def exceeded(self, mark: str) -> str | None:
        """What is wrong, where the family holds too much."""
        if self.memory_mib is None:
            return None
        held = sum(resident_bytes(pid) for pid in family.members(mark))
        return None if held <= self.memory_mib * MIB else f"the solver held {held // MIB} MiB, and memory_mib is {self.memory_mib}"

    def close(self) -> str | None:
        """After its processes have ended: why they were ended, if it was for too much memory."""
        return None


def resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0
