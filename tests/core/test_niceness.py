"""Sessions share the cores; one whose leader is nice gives way to the others where the kernel has groups of
sessions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from optpipe.process.niceness import group_as_nice

LEADER = "import os, sys; os.nice(7); print(flush=True); sys.stdin.read()"


def group(pid: int) -> str:
    """Its niceness, which is nothing where the kernel has no such groups."""
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
    group_as_nice(leader.pid)  # nobody any more
