"""Work in the background disturbs little: a session is as nice as its leader, and modules stay out of collections."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from optpipe.process.background import group_as_nice

LEADER = "import os, sys; os.nice(7); print(flush=True); sys.stdin.read()"
SERVICE = """
import gc, os, optpipe_server
def ready(url):
    print(gc.get_freeze_count(), flush=True)
    os._exit(0)
settings = optpipe_server.Settings("sqlite:///jobs.sqlite", processes=1, solves=0)
optpipe_server.serve(settings, port=0, ready=ready)
"""
POOL = "import gc, optpipe_server.pool.warm; print(gc.get_freeze_count())"


@pytest.mark.parametrize("code", [SERVICE, POOL], ids=["the service", "its pool"])
def test_the_heap_is_frozen_when_the_process_answers(code: str, tmp_path: Path) -> None:
    told = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert int(told.stdout) > 50_000, "objects, most of them of modules"


def test_a_session_is_as_nice_as_its_leader() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LEADER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as leader:
        leader.stdout.readline()
        group_as_nice(leader.pid)
        group = Path(f"/proc/{leader.pid}/autogroup")  # only where the kernel groups sessions
        if group.exists():
            text = group.read_text().partition(" ")[2].strip()
            assert text in (f"nice {os.getpriority(os.PRIO_PROCESS, leader.pid)}", "")
        leader.kill()
    group_as_nice(leader.pid)  # the process has ended: nothing happens
