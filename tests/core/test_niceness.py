"""A session of processes gets the niceness of its leader, where the kernel groups sessions (autogroup)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from optpipe.process.background import group_as_nice

LEADER = "import os, sys; os.nice(7); print(flush=True); sys.stdin.read()"


def group(pid: int) -> str:
    """The niceness of its group, such as `nice 7`; empty where the kernel has no such groups."""
    try:
        return Path(f"/proc/{pid}/autogroup").read_text().partition(" ")[2].strip()
    except OSError:
        return ""


def test_a_session_is_as_nice_as_its_leader() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LEADER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        leader.stdout.readline()
        group_as_nice(leader.pid)
        assert group(leader.pid) in (f"nice {os.getpriority(os.PRIO_PROCESS, leader.pid)}", "")
        leader.kill()
    group_as_nice(leader.pid)  # the process has ended: nothing happens
