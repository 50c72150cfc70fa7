"""`optpipe solve`: what it prints and writes, how it ends, and what its cache knows; `optpipe compare`: a table for
people, JSON for programs, a picture of each schedule; `optpipe try`."""

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
from functools import partial
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from support.fakes.scripted_solver import all_forwards_first, one_at_a_time
from support.problems import parsed, pipeline, stage
from support.processes import until

from optpipe import Problem, Result, ScheduleFile, anytime, check, comparison
from optpipe.options import CompareOptions, SearchOptions, SolveOptions
from optpipe.results import Improvement
from optpipe.show.pareto import Point, chart, frontier
from optpipe_cache import storage
from optpipe_cli import compare
from optpipe_cli.output import ctrl_c_calls
from optpipe_cli.solve import view
from optpipe_solver.engines import COMPILING
from optpipe_solver.heuristics import generate
from optpipe_solver.systems import in_best_order

EXAMPLES = Path(__file__).parents[2] / "examples" / "problems"
PROBLEM = str(EXAMPLES / "fastlink-4x8.json")
COMMAND = (sys.executable, "-m", "optpipe_cli")


def test_solve_writes_what_check_accepts(scripted, small):
    code, out, _ = scripted("solve", "p.json", "--method", "good", "-o", "s.json", "--html", "s.html")
    assert code == 0
    assert "proven optimal" in out
    assert out.endswith("\nwritten to s.json, s.html\n")
    file = ScheduleFile.load("s.json")
    assert (file.status, file.method, file.makespan_ms) == ("optimal", "fast", all_forwards_first(small).makespan_ms)
    assert '"lower_bound_ms":' in Path("s.html").read_text()
    scripted("solve", "p.json", "--method", "good", "--objective", "span", "-o", "span.json")
    assert ScheduleFile.load("span.json").lower_bound_ms is None  # which would be the makespan's
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
    with ctrl_c_calls(lambda: None):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


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
    done = subprocess.run([*COMMAND, *words], stdout=write, stderr=subprocess.PIPE, check=False)
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
        done = subprocess.run([*COMMAND, "check", "p.json", "s.json"], stdout=full, stderr=subprocess.PIPE, check=False)
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


def test_ctrl_c_while_an_engine_computes_keeps_the_best(tmp_path):
    words = ["solve", str(EXAMPLES / "fastlink-8x16.json")]
    words += ["--method", "lns", "--time-limit", "600", "--threads", "1", "--no-cache", "-o", "s.json"]
    with subprocess.Popen([*COMMAND, *words], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        family = psutil.Process(process.pid)
        until(lambda: any(at_work(child) for child in family.children(recursive=True)))
        started = family.children(recursive=True)
        os.kill(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=60)  # a second on a quiet machine
    assert process.returncode == 0
    assert re.match(r"[\d.]+ ms by \S+, bubble .*\n(OptPipe.*\n(Why: .*\n)?)?written to s.json\n$", out)
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


def test_the_table_says_what_fits_and_why_the_rest_does_not(run):
    words = "--methods gpipe,1f1b-recompute,naive,zb-v,auto --placements all --time-limit 100 --gap 0.2"
    code, out, err = run("compare", PROBLEM, *words.split())
    assert code == 0
    assert all(line.endswith(COMPILING) for line in err.splitlines())
    head, columns, *rows = out.splitlines()
    assert [line for line in out.splitlines() if line != line.rstrip()] == []
    assert head == "fastlink-4x8: 4 devices, 4 stages, 8 micro-batches, k = 0.857"
    assert columns.split() == ["method", "makespan", "bubble", "peak", "gap", "bound", "stages"]
    assert all(re.match(r"auto(, any)? \(\S+\) ", row) for row in rows[:2])
    assert [row.split()[0] for row in rows[2:5]] == ["naive", "zb-v", "gpipe"]
    assert re.search(r"[\d.]+ GB +[\d.]+% +[\d.]+  (as given|\d looped|\d V-shaped)$", rows[0])
    assert re.search(r"40 > 15 GB +as given$", rows[4])
    assert re.search(r"\nWhy: within the same memory it .* its devices wait \d+% of the time instead of \d+%\.\n", out)
    assert "\nno schedule:\n1f1b-recompute  stages[0].recompute_ms is missing" in out


def test_an_activation_counts_once_however_many_parts_leave():
    problem = pipeline(1, 2, 99, stage(offload=(1, 1, 8), offload_parts=2))
    away = parsed(problem, "0F0 0O0 0O0.1 0D0 0D0.1 0R0 0R0.1 0BW0 0F1 0BW1")
    assert "offloads 0% of all activations instead of 50%" in [*compare.gain_lines(away, one_at_a_time(problem))][1]


def test_on_a_terminal_of_80_columns_nothing_is_cut(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    _, out, _ = run(
        "compare", PROBLEM, "--methods", "1f1b,zb-v,v-half,1f1b-recompute,dualpipe,bpipe,chronos-offload,po-h,gpipe"
    )
    assert "…" not in out
    plain = re.sub(r"\x1b\[[\d;]*m", "", out).splitlines()
    assert max(map(len, plain)) <= 80
    assert "its optimizer cannot run on the host" in " ".join(" ".join(plain).split())  # the end of a reason


def test_a_comparison_says_who_is_shorter_and_by_how_much():
    problem = Problem.load(PROBLEM)
    published, slower = in_best_order("po-h", problem), generate("naive", problem)
    ms = f"{slower.makespan_ms:.0f}", f"{published.makespan_ms:.4g}"
    more = slower.makespan_ms / published.makespan_ms - 1
    assert list(compare.gain_lines(published, slower)) == [
        f"OptPipe's schedule takes {more:.0%} more time than po-h, the best published one that fits: "
        f"{ms[0]} instead of {ms[1]} ms."
    ]
    assert list(compare.gain_lines(published, published, where=" here")) == [
        f"OptPipe found nothing shorter than po-h, the best published one that fits here: {ms[1]} ms."
    ]
    less, why = compare.gain_lines(slower, published)
    assert "% less time than naive, " in less
    assert why.startswith("Why: ")


def test_what_a_search_notes_is_told(run, monkeypatch):
    ended = "milp: HiGHS: optimal after 0.1 s"

    def search(problem: Problem, *_: object) -> list[Result]:
        return [replace(Result.from_schedule(generate("adaoffload", problem), SearchOptions()), notes=(ended,))]

    monkeypatch.setattr(comparison, "search", search)
    words = ("compare", PROBLEM, "--methods", "milp", "--placements", "keep")
    assert run(*words)[2] == f"note: milp: {ended}\n"
    assert json.loads(run(*words, "--json")[1])["rows"][0]["notes"] == [ended]


def test_as_json_with_pictures(run, tmp_path):
    words = ("--methods", "gis:group=2,gpipe,chronos-recomp", "--json", "--pictures", "pictures/of/all")
    code, out, _ = run("compare", PROBLEM, *words)
    answer = json.loads(out)
    assert code == 0
    assert answer["problem"] == "fastlink-4x8"
    assert answer["k"] == pytest.approx([24 / 28] * 4)
    rows = {row["method"]: row for row in answer["rows"]}
    assert list(rows) == ["gis:group=2", "gpipe", "chronos-recomp"]
    assert rows["gpipe"]["fits"] is False
    assert rows["gpipe"]["reason"] == "device 0 needs 40 GB and has 15 GB"
    assert rows["gpipe"]["peak_bytes"] == [40 * 10**9] * 4
    assert rows["gpipe"]["found_by"] == "gpipe"
    assert rows["chronos-recomp"]["makespan_ms"] is None
    drawn = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "pictures" / "of" / "all").iterdir()}
    assert set(drawn) == {"gis-group-2.svg", "gpipe.svg"}
    assert "fastlink-4x8 · gpipe" in drawn["gpipe.svg"]


def test_parameters_of_one_method_stand_between_commas_too():
    options = CompareOptions(methods="gis:group=5,1f1b,x:a=1,b=2,y:c=3, auto")  # type: ignore[arg-type]
    assert options.methods == ("gis:group=5", "1f1b", "x:a=1,b=2", "y:c=3", "auto")


def test_the_frontier_has_no_dominated_points():
    places = {"a": (10, 5.0), "b": (5, 9.0), "c": (7, 9.0), "d": (20, 5.0), "e": (3, 20.0), "f": (10, 6.0)}
    points = [Point(name, *place) for name, place in places.items()]
    assert [point.name for point in frontier(points)] == ["e", "b", "a"]
    page = chart(points, {"ours & theirs": [Point("x", 4, 6.0)]}, {"all": 30}, "t").html
    drawn = json.loads(re.findall(r'id="document">(.*?)</script>', page)[0])
    others, theirs, _, ours = drawn["data"]
    assert (theirs["text"], sorted(others["text"])) == (["e", "b", "a"], ["c", "d", "f"])
    assert (ours["name"], ours["text"]) == ("ours &amp; theirs", ["6 ms"])
    low, high = drawn["layout"]["yaxis"]["range"]  # longer ones than 1.7 times the shortest are out of sight
    assert 4.5 < low < 5 < 6 < high < 6.5
    assert drawn["layout"]["shapes"][0]["label"]["text"] == "all: 30 B"


def test_the_example_gains_much_because_memory_binds(run, monkeypatch):
    # The search ends with a schedule that gains 26 %, which heuristics find, however long a busy machine takes for it;
    # AdaOffload's on the stages as given gains less.
    monkeypatch.setattr(compare, "SEARCH_S", 200.0)
    monkeypatch.setattr(compare, "SolveOptions", partial(compare.SolveOptions, gap=0.131))
    page = Path("page.html")
    code, out, _ = run("try", "--html", page)
    assert code == 0, out
    rows = [line for line in out.splitlines() if re.search(r" ms +\d+%", line)]
    fits = [row.split()[0] for row in rows if "does not fit" not in row]
    assert fits[:3] == ["OptPipe", "interleaved-recompute", "1f1b-recompute"]
    assert {row.split()[0] for row in rows if "does not fit" in row} >= {"1f1b", "interleaved", "po-h", "po-f", "zb-v"}
    (less, after, before) = re.findall(r"takes (\d+)% less time.*: (\d+) instead of (\d+) ms", out)[0]
    assert int(less) >= 26
    assert 1 - int(after) / int(before) == pytest.approx(int(less) / 100, abs=0.01)
    assert f"its devices wait {rows[0].split()[4]} of the time instead of {rows[1].split()[3]}" in out
    assert [line for line in out.splitlines() if line != line.rstrip()] == []
    assert page.stat().st_size > 1e6  # plotly is in it
    assert "interleaved-recompute" in page.read_text(encoding="utf-8")


def test_the_curve_is_of_more_than_its_best_point(run, monkeypatch):
    # Searches end with their first schedules, which are no longer than those for less memory.
    monkeypatch.setattr(compare, "CURVE_S", 200.0)
    monkeypatch.setattr(compare, "SolveOptions", partial(compare.SolveOptions, gap=1.0))
    # As on a new machine.
    compiled, run_process = list[list[str]](), subprocess.run
    monkeypatch.setattr(compare, "waits_for_compiler", lambda engine: not compiled)
    monkeypatch.setattr(
        subprocess, "run", lambda words, **more: (compiled.append(words), run_process(words, **more))[1]
    )
    code, out, err = run("try", "--curve", "--html", "curve.html")
    assert code == 0, out
    assert (err, compiled) == ("compiling, once on a machine\n", [[sys.executable, "-m", "optpipe_solver.compiling"]])
    rows = re.findall(r"^ *([\d.]+) GB +(\d+) ms by (\S+) +(\d+) ms by (\S+) +(-?\d+)%$", out, re.MULTILINE)
    figures = [tuple(map(float, (memory, before, after, less))) for memory, before, _, after, _, less in rows]
    assert [memory for memory, *_ in figures] == pytest.approx([1.5 * activations for activations in compare.CURVE])
    for _, before, after, less in figures:
        assert 1 - after / before == pytest.approx(less / 100, abs=0.007)
    for one, more in pairwise(figures):
        assert one[1] >= more[1]
        assert one[2] >= more[2]
    published = {name for _, _, name, *_ in rows}
    assert published >= {"interleaved-recompute", "zb-v"}, "others are best with other memory"
    drawn = Path("curve.html").read_text(encoding="utf-8")
    assert all(name in drawn for name in published)
