"""What keeps work in the background from disturbing: niceness that counts between sessions, no long collections."""

from __future__ import annotations

import errno
import gc
import os
import time
from contextlib import suppress

NICER = 10  # how much nicer searches are than what answers requests or trains
AGAIN_S, TRIES = 0.12, 5  # without root the kernel allows ten changes a second, of all groups together


def group_as_nice(pid: int) -> None:
    """Makes the session that this process leads as nice as the process.

    Where Linux groups processes by session (`sched_autogroup_enabled`, sched(7)), each session gets the same share of
    the cores, and a process's niceness counts only within its own session. Elsewhere, and for a process that has ended,
    this does nothing.
    """
    for _ in range(TRIES):
        try:
            nice = os.getpriority(os.PRIO_PROCESS, pid)
            if nice > 0:
                with open(f"/proc/{pid}/autogroup", "w") as file:
                    file.write(str(nice))
            return
        except OSError as error:  # no such groups here, or too soon after another
            if error.errno != errno.EAGAIN:
                return
            time.sleep(AGAIN_S)


def be_nicer(pid: int) -> None:
    """Makes this process or thread nicer than the calling thread; nothing if it has ended."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICER))


def settle() -> None:
    """Takes all that exists by now out of garbage collection; to be called once a process is ready to answer.

    A full collection visits every object and stops every thread meanwhile. In a process that has imported a web
    framework or an array library that takes longer than a reply.
    """
    gc.collect()
    gc.freeze()
