"""Niceness that counts between sessions, too."""

from __future__ import annotations

import errno
import os
import time

NICER = 10  # what computes for the service than what answers its requests
AGAIN_S, TRIES = 0.12, 5  # the kernel lets who is not root change a group ten times a second, all groups together


def group_as_nice(pid: int) -> None:
    """The session that this process leads is as nice as the process.

    Where Linux groups processes by session (`sched_autogroup_enabled`, sched(7)), each session has the same share of
    the cores, and the niceness of a process counts within its own only. Does nothing elsewhere, nor for a process that
    has ended.
    """
    for _ in range(TRIES):
        try:
            nice = os.getpriority(os.PRIO_PROCESS, pid)
            if nice > 0:
                with open(f"/proc/{pid}/autogroup", "w") as file:
                    file.write(str(nice))
        except OSError as error:  # no such groups here, or too soon after another
            if error.errno != errno.EAGAIN:
                return
            time.sleep(AGAIN_S)
        else:
            return
