"""`optpipe solve` and `bench` with the real solver behind them: Ctrl-C while engines compute, and the progress of
searches."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from optpipe import ScheduleFile, anytime, check
from optpipe.show.progress import Progress, chart
from optpipe_cli import main as cli

EXAMPLES = Path(__file__).parents[2] / "examples" / "problems"
HEURISTIC = ("--method", "adaoffload", "--time-limit", "200")  # which ends on its own
CLI = "from optpipe_cli.main import main; main()"


def test_ctrl_c_while_an_engine_computes_keeps_the_best(tmp_path):
    words = [
        "solve",
        str(EXAMPLES / "fastlink-8x16.json"),
        "--method",
        "lns",
        "--time-limit",
        "600",
        "--threads",
        "1",
        "--no-cache",
        "-o",
        "s.json",
    ]
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
    assert re.match(r"[\d.]+ ms by \S+, bubble .*\nwritten to s.json\n$", out)
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


def bench(monkeypatch, capsys, *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["optpipe", "bench", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    return str(capsys.readouterr().out)


def test_bench_solver_prints_and_draws_the_progress(monkeypatch, capsys, tmp_path):
    paths = [str(EXAMPLES / f"{name}.json") for name in ("figure4-4x6", "vshape-4x8")]
    picture, results = tmp_path / "progress.svg", ("--results", str(tmp_path / "results"))
    rows = json.loads(
        bench(monkeypatch, capsys, "solver", *paths, "--time-limit", "9", "--json", "--svg", str(picture), *results)
    )
    assert [row["problem"] for row in rows] == ["figure4-4x6", "vshape-4x8"]
    assert {"first_s", "first_ms", "ms_after_1_s", "best_ms", "bound_ms", "gap", "method", "status"} <= rows[0].keys()
    assert "ms_after_10_s" not in rows[0]
    assert all(row["bound_ms"] <= row["best_ms"] <= row["first_ms"] for row in rows)
    drawn = picture.read_text(encoding="utf-8")
    picture.unlink()
    monkeypatch.setattr(anytime, "solve", None)  # what is in the file is not solved again
    bench(monkeypatch, capsys, "solver", *paths, "--time-limit", "9", "--svg", str(picture), *results)
    assert picture.read_text(encoding="utf-8") == drawn
    assert all(name in drawn for name in ("figure4-4x6", "vshape-4x8", "proven optimal"))


def test_bench_jitter_compares_under_noise(monkeypatch, capsys):
    path = str(EXAMPLES / "figure4-4x6.json")
    (row,) = json.loads(bench(monkeypatch, capsys, "jitter", path, *HEURISTIC, "--json"))
    assert row["nominal_ms"] == 21.0
    assert row["nominal_percentile_ms"] > 21.0
    assert row["robust_percentile_ms"] <= row["nominal_percentile_ms"]
    assert re.search(r"figure4-4x6 +21 ", bench(monkeypatch, capsys, "jitter", path, *HEURISTIC))


def test_the_picture_of_progress():
    steps = [(0.2, 150.0, "naive"), (1.0, 110.0, "cyclic"), (30.0, 100.0, "lns")]
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
    assert "110 ms by cyclic after 1.00 s" in drawn
    (path,) = re.findall(r'<path d="M([\d.]+),([\d.]+) H([\d.]+) V([\d.]+) H([\d.]+) V([\d.]+) H([\d.]+)"', drawn)
    x0, y0, x1, y1, x2, y2, end = map(float, path)
    assert x0 < x1 < x2 < end  # later is further right
    assert y0 < y1 < y2  # shorter is further down
    assert (y1 - y0) / (y2 - y0) == pytest.approx(0.8, abs=0.01)


def test_bench_first_times_valid_schedules(monkeypatch, capsys):
    answer = json.loads(bench(monkeypatch, capsys, "first", "--devices", "4", "--microbatches", "8", "--json"))
    rows = {row["method"]: row for row in answer["first"]}
    assert all(row["valid"] and row["seconds"] > 0 for row in rows.values())
    assert answer["bound_ms"] <= rows["adaoffload"]["ms"] < rows["naive"]["ms"]
    assert "adaoffload" in bench(monkeypatch, capsys, "first", "--devices", "2", "--microbatches", "2")
