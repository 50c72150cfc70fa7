"""Process trees: what a child started, and all that this started in turn, found by a mark in their environment.

A mark is inherited whatever becomes of parents, groups and sessions, so it finds a tree to its last process, by
`/proc`.

Whoever wants all its children to end with it (`KillOnExit`) starts `python -m optpipe.process.process_tree MARK`. That
kills every process with the mark, stopped ones too, as soon as its standard input closes without a word: when who
started it dies, however that happens.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from uuid import uuid4

VARIABLE = "OPTPIPE_TREE"
ENDING_S = 5.0  # for how long a tree that starts new processes while it is killed is searched again
_numbers = count()


OWN: str  # what the marks of all children of this process begin with


def _begin() -> None:
    """Gives this process marks of its own; again after a fork, whose two processes would kill each other's children."""
    global OWN
    OWN = f"/{uuid4().hex}."


_begin()
os.register_at_fork(after_in_child=_begin)


def new_mark() -> str:
    """A mark that no other child of this process has."""
    return f"{OWN}{next(_numbers)}/"


def environment(mark: str) -> dict[str, str]:
    """This process's environment, with the mark added to those that it has inherited."""
    return {**os.environ, VARIABLE: os.environ.get(VARIABLE, "") + mark}


def members(mark: str) -> list[int]:
    """The ids of the processes that have the mark, or one that begins with it."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and mark in marks(int(name))]


def marks(pid: int) -> str:
    """The marks of a process, one after the other; empty if it has ended or belongs to another user."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return ""
    name = f"{VARIABLE}=".encode()
    return next((text.removeprefix(name).decode(errors="replace") for text in variables if text.startswith(name)), "")


def resident_bytes(pids: Iterable[int]) -> int:
    """What these processes hold in memory. Pages that they share count for each of them."""
    pages = 0
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/statm") as file:  # else it has ended
            pages += int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def end(mark: str) -> int:
    """Kills every process of the tree, stopped ones too; returns how many there were."""
    ended: set[int] = set()
    until = time.monotonic() + ENDING_S
    while (there := members(mark)) and time.monotonic() < until:
        for pid in there:
            with suppress(OSError):
                process = os.pidfd_open(pid)
                try:
                    if mark in marks(pid):  # not another process that got its number meanwhile
                        signal.pidfd_send_signal(process, signal.SIGKILL)
                finally:
                    os.close(process)
        ended.update(there)
        time.sleep(0.01)
    return len(ended)


class KillOnExit:
    """Until it is cancelled, all children of this process (`OWN`) are killed when this process ends."""

    def __init__(self) -> None:
        self._watcher = subprocess.Popen(
            [sys.executable, "-m", __name__, OWN],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def cancel(self) -> None:
        """The watching process ends, the children stay."""
        if self._watcher.poll() is None:
            self._watcher.communicate(b"cancelled")


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM):  # meant for all of a service: this process outlives the others
        signal.signal(ignored, signal.SIG_IGN)
    if not os.read(0, 1):
        end(sys.argv[1])


if __name__ == "__main__":
    main()
