"""`optpipe solve`: what it prints and writes, how it ends, and what its cache knows."""

import io
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from support.fakes.scripted_solver import all_forwards_first, one_at_a_time

from optpipe import Result, ScheduleFile, anytime, check
from optpipe.options import SolveOptions
from optpipe.results import Improvement
from optpipe_cache import storage
from optpipe_cli.solve import view

CLI = "from optpipe_cli.main import main; main()"


def test_solve_writes_what_check_accepts(scripted, small):
    code, out, _ = scripted("solve", "p.json", "--method", "good", "-o", "s.json", "--html", "s.html")
    assert code == 0
    assert "proven optimal" in out
    file = ScheduleFile.load("s.json")
    assert (file.status, file.method, file.makespan_ms) == ("optimal", "fast", all_forwards_first(small).makespan_ms)
    assert '"lower_bound_ms":' in Path("s.html").read_text()
    assert scripted("check", "p.json", "s.json")[0] == 0
    assert scripted("check", "p.json", "s.json", "--json")[1].startswith('{\n "valid": true')


def test_a_proven_schedule_is_not_solved_again(scripted, small):
    scripted("solve", "p.json", "--method", "good")
    # The fake solver does not know the method auto and would find nothing.
    assert "(cached)" in scripted("solve", "p.json")[1]
    assert "(cached)" not in scripted("solve", "p.json", "--no-cache", "--method", "worse")[1]


def test_an_infeasible_problem_ends_with_3_and_notes_are_printed(scripted, small):
    code, out, _ = scripted("solve", "p.json", "--method", "infeasible", "-o", "s.json")
    assert (code, out) == (3, "infeasible: device 0 needs 2 bytes and has 1\n")
    code, out, err = scripted("solve", "p.json", "--method", "crash")
    assert (code, "by slow" in out) == (0, True)
    assert "note: " in err
    assert "something broke" in err


@pytest.mark.parametrize(("method", "told"), [("silent", "no schedule was found"), ("sleep", "by slow")])
def test_ctrl_c_ends_the_search_and_keeps_the_best(scripted, small, monkeypatch, method, told):
    def interrupted(search):
        if method == "sleep":
            yield next(search)
        signal.raise_signal(signal.SIGINT)
        yield from search._results

    monkeypatch.setattr(anytime.Search, "__iter__", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    began = time.monotonic()
    code, out, _ = scripted("solve", "p.json", "--method", method, "-o", "s.json")
    assert told in out
    assert (code, Path("s.json").exists()) == ((0, True) if method == "sleep" else (1, False))
    assert time.monotonic() - began < 30  # the solver would have slept for 60
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_unusable_cache_is_reported_and_ignored(scripted, small, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "BUSY_S", 0.1)
    scripted("cache", "list")
    rival = sqlite3.connect(tmp_path / "cache.db", isolation_level=None)
    rival.execute("BEGIN IMMEDIATE")
    code, out, err = scripted("solve", "p.json", "--method", "good", "-o", "s.json")
    rival.close()
    assert (code, Path("s.json").exists(), "proven optimal" in out) == (0, True, True)
    assert err.splitlines()[1].startswith("note: ")
    assert "database is locked" in err
    (tmp_path / "cache.db").write_bytes(b"no database" * 999)
    code, out, err = scripted("solve", "p.json", "--method", "good", "--json")
    assert (code, json.loads(out)["status"]) == (0, "optimal")
    assert "the cache cannot be used" in err


@pytest.mark.parametrize("words", [["check", "p.json", "s.json"], ["show", "s.json"]])
def test_a_reader_that_has_enough_is_no_error(scripted, small, words):
    """As `head` ends, here before the first line."""
    scripted("solve", "p.json", "--method", "good")
    one_at_a_time(small).save("s.json")
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", CLI, *words], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device on this system")
def test_a_full_disk_is_one_sentence_and_does_not_hide_the_answer(scripted, small):
    code, out, err = scripted("solve", "p.json", "--method", "good", "-o", "/dev/full")
    assert code == 2
    assert "proven optimal" in out
    assert err.splitlines()[1:] == ["error: /dev/full: cannot be written: No space left on device"]
    one_at_a_time(small).save("s.json")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", CLI, "check", "p.json", "s.json"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (2, b"error: No space left on device\n")


def test_a_search_as_json_lists_its_incumbents(scripted, small):
    code, out, _ = scripted("solve", "p.json", "--method", "good", "--json")
    figures = json.loads(out)
    assert (code, figures["status"], figures["gap"], figures["peak_bytes"]) == (0, "optimal", 0.0, [3, 3])
    assert figures["host_peak_bytes"] == [0, 0]
    slow, fast = one_at_a_time(small).makespan_ms, all_forwards_first(small).makespan_ms
    assert (figures["method"], figures["makespan_ms"]) == ("fast", fast)
    steps = [(step["method"], step["value_ms"], step["lower_bound_ms"]) for step in figures["incumbents"]]
    assert steps == [("slow", slow, None), ("fast", fast, 1.0)]
    first, second = (step["time_s"] for step in figures["incumbents"])
    assert 0 < first <= second <= figures["time_s"] + 0.001  # `time_s` is rounded


def test_what_a_terminal_shows_of_a_search_while_it_runs(small):
    fast = all_forwards_first(small)
    found = Result.from_schedule(fast, SolveOptions(), 4.0, "an engine")
    step = Improvement(1.5, "an engine", fast.makespan_ms, 4.0)
    console = Console(width=120, file=io.StringIO(), force_terminal=False)
    for result in (Result("unknown"), replace(found, history=(step,), notes=("an engine compiles",))):
        console.print(view(result, 12.0, 60.0))
    told = console.file.getvalue()
    assert "best none yet   bound not known" in told
    assert "best 12 ms by an engine   bound 4 ms   gap 66.7%   bubble 25.0%" in told
    assert told.count("12 s of 60 s") == 2
    assert "     1.5 s   12 ms   an engine" in told
    assert "an engine compiles" in told


EXAMPLES = Path(__file__).parents[2] / "examples" / "problems"


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
