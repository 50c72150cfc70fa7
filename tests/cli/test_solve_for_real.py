"""`optpipe solve` with the real solver behind it: Ctrl-C while engines compute; and the picture of searches."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.progress import Progress, chart
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
        deadline = time.monotonic() + 90
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
        return "optpipe_solver.engine" in process.cmdline() and process.cpu_times().user > 1.5
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def test_the_picture_of_progress():
    steps = [(0.2, 150.0, "naive"), (1.0, 110.0, "dispatch"), (30.0, 100.0, "lns")]
    drawn = chart(
        [
            Progress("one & two", steps, 100.0, 60.0),
            Progress("none", [], 5.0, 60.0),
            Progress("no bound", steps, 0.0, 60.0),
        ],
        "t",
    )
    assert "one &amp; two" in drawn
    assert "100 ms, proven optimal" in drawn
    assert "no schedule" in drawn
    assert drawn.count("<circle") == 3
    assert "110 ms by dispatch after 1.00 s" in drawn
    (path,) = re.findall(r'<path d="M([\d.]+),([\d.]+) H([\d.]+) V([\d.]+) H([\d.]+) V([\d.]+) H([\d.]+)"', drawn)
    x0, y0, x1, y1, x2, y2, end = map(float, path)
    assert x0 < x1 < x2 < end  # later is further right
    assert y0 < y1 < y2  # shorter is further down
    assert (y1 - y0) / (y2 - y0) == pytest.approx(0.8, abs=0.01)
