"""cgroup v2, if it is delegated to us: the kernel limits a search's memory and number of processes.

Below the group in which this process was started there is `optpipe-own`, which holds this process, because a group that
delegates controllers may hold none itself; and one group per search.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

MOST_PIDS = 1024  # threads count; each engine of a portfolio has about ten
CONTROLLERS = {"memory", "pids"}
OWN = "optpipe-own"
EMPTY_S = 5.0  # for killed processes to leave a group
MIB = 2**20
_numbers = count()


class Group:
    """The cgroup of one search, with its limits set before any process is in it."""

    def __init__(self, parent: Path, memory_mib: int) -> None:
        self._folder = parent / f"optpipe-{os.getpid()}-{next(_numbers)}"
        self._folder.mkdir()
        self._set("memory.max", memory_mib * MIB)
        self._set("memory.swap.max", 0, if_exists=True)  # a kernel without swap accounting has none
        self._set("memory.oom.group", 1, if_exists=True)  # kill all of a search or nothing
        self._set("pids.max", MOST_PIDS)

    def _set(self, name: str, value: int, if_exists: bool = False) -> None:
        if not if_exists or (self._folder / name).exists():
            (self._folder / name).write_text(str(value))

    def admit(self, pid: int) -> None:
        """Move a process with all its threads into the group; what it starts from now on is in it, too."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    @property
    def oom_killed(self) -> bool:
        """Whether the kernel has killed processes of the group for lack of memory."""
        events = dict(line.split() for line in (self._folder / "memory.events").read_text().splitlines())
        return int(events.get("oom_kill", 0)) > 0

    def remove(self) -> None:
        """Kill the processes that are left, and remove the group."""
        with suppress(OSError):
            (self._folder / "cgroup.kill").write_text("1")
        until = time.monotonic() + EMPTY_S
        while time.monotonic() < until:
            try:
                self._folder.rmdir()
            except OSError:  # the kernel has not ended all processes yet
                time.sleep(0.01)
            else:
                return


def delegated_group(mounts: Path = Path("/proc/self/mounts"), own: Path = Path("/proc/self/cgroup")) -> Path | None:
    """Find and prepare the group below which groups with limits can be made; None if there is none."""
    try:
        group = _of_this_process(mounts, own)
        if group is None or not set((group / "cgroup.controllers").read_text().split()) >= CONTROLLERS:
            return None
        if not set((group / "cgroup.subtree_control").read_text().split()) >= CONTROLLERS:
            aside = group / OWN
            aside.mkdir(exist_ok=True)
            (aside / "cgroup.procs").write_text(str(os.getpid()))
            everything = " ".join(f"+{name}" for name in sorted(CONTROLLERS))
            (group / "cgroup.subtree_control").write_text(everything)  # fails while other processes are in the group
        Group(group, 1).remove()  # proves that it works
    except OSError:
        return None
    return group


def _of_this_process(mounts: Path, own: Path) -> Path | None:
    """This process's group in the unified hierarchy, the only one in which controllers are delegated."""
    places = [fields[1] for fields in map(str.split, mounts.read_text().splitlines()) if fields[2] == "cgroup2"]
    paths = [line.removeprefix("0::") for line in own.read_text().splitlines() if line.startswith("0::")]
    if not places or not paths:
        return None
    group = Path(places[0]) / paths[0].strip("/")
    return group.parent if group.name == OWN else group
