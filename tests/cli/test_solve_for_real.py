"""`optpipe solve` with the real solver behind it: Ctrl-C while engines compute."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from optpipe import ScheduleFile, check

EXAMPLES = Path(__file__).parents[2] / "examples" / "problems"
CLI = "from optpipe_cli.main import main; main()"


def test_ctrl_c_while_an_engine_computes_keeps_the_best(tmp_path):
    words = ["solve", str(EXAMPLES / "fastlink-8x16.json")]
    words += ["--method", "lns", "--time-limit", "600", "--threads", "1", "--no-cache", "-o", "s.json"]
    with subprocess.Popen(
        [sys.executable, "-c", CLI, *words], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        family = psutil.Process(process.pid)
        deadline = time.monotonic() + 240  # on a busy machine
        while not any(at_work(child) for child in family.children(recursive=True)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        started = family.children(recursive=True)
        os.kill(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=60)  # a second on a quiet machine
    assert process.returncode == 0
    assert re.match(r"[\d.]+ ms by \S+, bubble .*\n(OptPipe.*\nWhy: .*\n)?written to s.json\n$", out)
    found = ScheduleFile.load(tmp_path / "s.json").schedule()
    assert check(found.problem, found) == []
    _, alive = psutil.wait_procs(started, timeout=60)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []


def at_work(process: psutil.Process) -> bool:
    """Return whether the process is an engine that has done its imports."""
    try:
        return "optpipe_solver.engines" in process.cmdline() and process.cpu_times().user > 1.5
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False
