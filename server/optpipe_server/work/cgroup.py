"""cgroup v2, where it is delegated to us: the kernel keeps a search's memory and number of processes within limits.

Layout, below the group that this process was started in: `optpipe-own` with this process, because a group that hands
controllers on may have none itself, and a group for each search.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

MOST_PIDS = 1024  # threads count; a portfolio's engines have some ten each, and a fork bomb any number
CONTROLLERS = {"memory", "pids"}
OWN = "optpipe-own"
EMPTY_S = 5.0  # for killed processes to leave a group
MIB = 2**20
_numbers = count()


class Group:
    """The group of one search, limited before anybody is in it."""

    def __init__(self, parent: Path, memory_mib: int) -> None:
        self._folder = parent / f"optpipe-{os.getpid()}-{next(_numbers)}"
        self._folder.mkdir()
        self._set("memory.max", memory_mib * MIB)
        self._set("memory.swap.max", 0, if_there=True)  # a kernel without swap accounting has none
        self._set("memory.oom.group", 1, if_there=True)  # all of it or nothing: half a solver is none
        self._set("pids.max", MOST_PIDS)

    def _set(self, name: str, value: int, if_there: bool = False) -> None:
        if not if_there or (self._folder / name).exists():
            (self._folder / name).write_text(str(value))

    def admit(self, pid: int) -> None:
        """Moves the process here, with all of its threads; what it starts from now on is here, too."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    @property
    def killed(self) -> bool:
        """Whether the kernel has killed for too much memory here."""
        events = dict(line.split() for line in (self._folder / "memory.events").read_text().splitlines())
        return int(events.get("oom_kill", 0)) > 0

    def remove(self) -> None:
        """Kills who is left, and removes the group."""
        with suppress(OSError):
            (self._folder / "cgroup.kill").write_text("1")
        until = time.monotonic() + EMPTY_S
        while time.monotonic() < until:
            try:
                self._folder.rmdir()
            except OSError:  # whom the kernel has not ended yet
                time.sleep(0.01)
            else:
                return


def delegated(mounts: Path = Path("/proc/self/mounts"), own: Path = Path("/proc/self/cgroup")) -> Path | None:
    """The group below which groups with limits can be made, made ready for it; None where there is none, for whatever
    reason."""
    try:
        group = _of_this_process(mounts, own)
        if group is None or not set((group / "cgroup.controllers").read_text().split()) >= CONTROLLERS:
            return None
        if not set((group / "cgroup.subtree_control").read_text().split()) >= CONTROLLERS:
            aside = group / OWN
            aside.mkdir(exist_ok=True)
            (aside / "cgroup.procs").write_text(str(os.getpid()))
            everything = " ".join(f"+{name}" for name in sorted(CONTROLLERS))
            (group / "cgroup.subtree_control").write_text(everything)  # refused while other processes are in the group
        Group(group, 1).remove()  # as proof
    except OSError:
        return None
    return group


def _of_this_process(mounts: Path, own: Path) -> Path | None:
    """This process's group in the unified hierarchy, which is the only one where controllers are handed on."""
    places = [fields[1] for fields in map(str.split, mounts.read_text().splitlines()) if fields[2] == "cgroup2"]
    paths = [line.removeprefix("0::") for line in own.read_text().splitlines() if line.startswith("0::")]
    if not places or not paths:
        return None
    group = Path(places[0]) / paths[0].strip("/")
    return group.parent if group.name == OWN else group
