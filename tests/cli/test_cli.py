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

import pytest
from rich.console import Console
from support.fakes.scripted_solver import all_forwards_first, one_at_a_time
from support.problems import pipeline, stage

from optpipe import ScheduleFile, anytime
from optpipe.options import SolveOptions
from optpipe.results import Result, Step
from optpipe_cache import storage
from optpipe_cli import main as cli
from optpipe_cli.live import view

TESTS = Path(__file__).parents[1]


@pytest.fixture
def problem(tmp_path):
    problem = pipeline(2, 3, 10, stage(sizes=(1, 1)), name="small")
    problem.save(tmp_path / "p.json")
    return problem


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a command in this process, with its own cache and the fake solver; return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPTPIPE_CACHE", str(tmp_path / "cache.db"))
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setattr(anytime, "SOLVER", "support.fakes.scripted_solver")

    def command(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["optpipe", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return command


def test_solve_writes_what_check_accepts(run, problem):
    code, out, _ = run("solve", "p.json", "--method", "good", "-o", "s.json", "--html", "s.html")
    assert code == 0
    assert "proven optimal" in out
    file = ScheduleFile.load("s.json")
    assert (file.status, file.method, file.makespan_ms) == ("optimal", "fast", all_forwards_first(problem).makespan_ms)
    assert '"lower_bound_ms":' in Path("s.html").read_text()
    assert run("check", "p.json", "s.json")[0] == 0
    assert run("check", "p.json", "s.json", "--json")[1].startswith('{\n "valid": true')


def test_a_proven_schedule_is_not_solved_again(run, problem):
    run("solve", "p.json", "--method", "good")
    # The fake solver does not know the method auto and would find nothing.
    assert "(cached)" in run("solve", "p.json")[1]
    assert "(cached)" not in run("solve", "p.json", "--no-cache", "--method", "worse")[1]


def test_an_infeasible_problem_ends_with_3(run, problem):
    code, out, _ = run("solve", "p.json", "--method", "infeasible", "-o", "s.json")
    assert (code, out) == (3, "infeasible: device 0 needs 2 bytes and has 1\n")


def test_notes_of_the_search_are_printed(run, problem):
    code, out, err = run("solve", "p.json", "--method", "crash")
    assert code == 0
    assert "by slow" in out
    assert "note: " in err
    assert "something broke" in err


@pytest.mark.parametrize(("method", "told"), [("silent", "no schedule was found"), ("sleep", "by slow")])
def test_ctrl_c_ends_the_search_and_keeps_the_best(run, problem, monkeypatch, method, told):
    def interrupted(search):
        if method == "sleep":
            yield next(search)
        signal.raise_signal(signal.SIGINT)
        yield from search._results

    monkeypatch.setattr(anytime.Search, "__iter__", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    began = time.monotonic()
    code, out, _ = run("solve", "p.json", "--method", method, "-o", "s.json")
    assert told in out
    assert (code, Path("s.json").exists()) == ((0, True) if method == "sleep" else (1, False))
    assert time.monotonic() - began < 30  # the solver would have slept for 60
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_unusable_cache_is_reported_and_ignored(run, problem, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "BUSY_S", 0.1)
    run("cache", "list")
    rival = sqlite3.connect(tmp_path / "cache.db", isolation_level=None)
    rival.execute("BEGIN IMMEDIATE")
    code, out, err = run("solve", "p.json", "--method", "good", "-o", "s.json")
    rival.close()
    assert (code, Path("s.json").exists(), "proven optimal" in out) == (0, True, True)
    assert err.splitlines()[1].startswith("note: ")
    assert "database is locked" in err
    (tmp_path / "cache.db").write_bytes(b"no database" * 999)
    code, out, err = run("solve", "p.json", "--method", "good", "--json")
    assert (code, json.loads(out)["status"]) == (0, "optimal")
    assert "the cache cannot be used" in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device on this system")
def test_a_full_disk_is_one_sentence_and_does_not_hide_the_answer(run, problem):
    code, out, err = run("solve", "p.json", "--method", "good", "-o", "/dev/full")
    assert code == 2
    assert "proven optimal" in out
    assert err.splitlines()[1:] == ["error: /dev/full: cannot be written: No space left on device"]
    one_at_a_time(problem).save("s.json")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", CLI, "check", "p.json", "s.json"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (2, b"error: No space left on device\n")


CLI = "from optpipe_cli.main import main; main()"


def test_pages_are_utf_8_wherever_they_are_written(run, problem):
    one_at_a_time(problem).save("s.json")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", CLI, "show", "s.json", "--html", "s.html", "--svg", "s.svg"]
    subprocess.run(command, env=os.environ | plain, check=True)
    assert "·" in Path("s.svg").read_text(encoding="utf-8")
    assert "·" in Path("s.html").read_text(encoding="utf-8")


def test_a_search_as_json_lists_its_incumbents(run, problem):
    code, out, _ = run("solve", "p.json", "--method", "good", "--json")
    figures = json.loads(out)
    assert (code, figures["status"], figures["gap"], figures["peak_bytes"]) == (0, "optimal", 0.0, [3, 3])
    assert figures["host_peak_bytes"] == [0, 0]
    slow, fast = one_at_a_time(problem).makespan_ms, all_forwards_first(problem).makespan_ms
    assert (figures["method"], figures["makespan_ms"], figures["percentile_ms"]) == ("fast", fast, None)
    steps = [(step["method"], step["value_ms"], step["lower_bound_ms"]) for step in figures["incumbents"]]
    assert steps == [("slow", slow, None), ("fast", fast, 1.0)]
    first, second = (step["time_s"] for step in figures["incumbents"])
    assert 0 < first <= second <= figures["time_s"] + 0.001  # `time_s` is rounded


def test_what_a_terminal_shows_of_a_search_while_it_runs(problem):
    fast = all_forwards_first(problem)
    found = Result.from_schedule(fast, SolveOptions(), 4.0, "an engine")
    step = Step(1.5, "an engine", fast.makespan_ms, 4.0)
    console = Console(width=120, file=io.StringIO(), force_terminal=False)
    for result in (Result("unknown"), replace(found, history=(step,), notes=("an engine compiles",))):
        console.print(view(result, 12.0, 60.0))
    told = console.file.getvalue()
    assert "best none yet   bound not known" in told
    assert "best 12 ms by an engine   bound 4 ms   gap 66.7%   bubble 25.0%" in told
    assert told.count("12 s of 60 s") == 2
    assert "     1.5 s   12 ms   an engine" in told
    assert "an engine compiles" in told


@pytest.mark.parametrize(
    ("field", "value"), [("makespan_ms", 1.0), ("span_ms", 99.0), ("lower_bound_ms", 1e6), ("status", "optimal")]
)
def test_check_finds_false_figures(run, problem, field, value):
    run("solve", "p.json", "--method", "worse", "-o", "s.json")
    content = json.loads(Path("s.json").read_text()) | {field: value}
    Path("s.json").write_text(json.dumps(content))
    code, out, _ = run("check", "p.json", "s.json")
    assert code == 1
    assert out.startswith(f"{field} = ")


def test_check_says_first_that_the_schedule_is_of_another_problem(run, problem):
    one_at_a_time(problem).save("s.json")
    problem.replace(microbatches=5, name="larger").save("larger.json")
    code, out, _ = run("check", "larger.json", "s.json")
    assert (code, len(out.splitlines())) == (1, 1)
    assert re.fullmatch(r"the schedule was made for .* 3 micro-batches\), not for larger \(.* 5 micro-batches\)\n", out)


def test_simulate_times_a_schedule_for_the_problem_given(run, problem):
    one_at_a_time(problem).save("s.json")
    slower = problem.replace(p2p_ms=5.0)
    slower.save("slower.json")
    code, out, _ = run("simulate", "slower.json", "s.json", "--json")
    assert (code, json.loads(out)["makespan_ms"]) == (0, one_at_a_time(slower).makespan_ms)
    assert f"makespan {one_at_a_time(problem).makespan_ms:g} ms" in run("simulate", "p.json", "s.json")[1]


def test_show(run, problem):
    one_at_a_time(problem).save("s.json")
    code, out, _ = run("show", "s.json")
    assert code == 0
    assert "device 1" in out
    assert run("show", "s.json", "--svg", "s.svg", "--trace", "t.json")[0] == 0
    assert Path("s.svg").read_text().count("<title>") == 18
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 18
    assert json.loads(run("show", "s.json", "--json")[1])["makespan_ms"] == one_at_a_time(problem).makespan_ms


def test_show_compares_two_schedules_on_a_page(run, problem):
    one_at_a_time(problem).save("slow.json")
    all_forwards_first(problem).save("fast.json")
    assert run("show", "fast.json", "--before", "slow.json", "--html", "s.html")[0] == 0
    document = json.loads(re.search(r'id="document">(.*?)</script>', Path("s.html").read_text(), re.DOTALL)[1])
    lengths = [one_at_a_time(problem).makespan_ms, all_forwards_first(problem).makespan_ms]
    assert [each["makespan_ms"] for each in document["schedules"]] == lengths


def test_the_cache_finds_and_keeps_the_better(run, problem):
    one_at_a_time(problem).save("slow.json")
    all_forwards_first(problem).save("fast.json")
    assert "from the pack, re-checked for this problem, " in run("cache", "lookup", "p.json")[1]
    problem.replace(p2p_ms=1e6).save("far.json")
    assert run("cache", "lookup", "far.json")[:2] == (1, "no schedule in the cache is valid for this problem\n")
    assert run("cache", "add", "slow.json", "fast.json")[1] == "2 added, 0 already known as good or better\n"
    assert run("cache", "add", "slow.json")[1] == "0 added, 1 already known as good or better\n"
    hit = json.loads(run("cache", "lookup", "p.json", "-o", "found.json", "--json")[1])
    assert (hit["hit"], hit["makespan_ms"]) == ("exact", all_forwards_first(problem).makespan_ms)
    assert run("check", "p.json", "found.json")[0] == 0
    run("solve", "p.json", "--method", "good")
    run("cache", "lookup", "p.json", "-o", "found.json")
    assert ScheduleFile.load("found.json").status == "optimal"
    problem.replace(p2p_ms=0.01).save("near.json")
    assert json.loads(run("cache", "lookup", "near.json", "--json")[1])["hit"] == "nearest"
    assert "small" in run("cache", "list")[1]
    assert run("cache", "export", "all.jsonl")[1].startswith("1 schedules")
    assert run("cache", "prune", "--days", "1")[1] == "0 deleted\n"
    assert run("cache", "prune", "0")[1] == "1 deleted\n"
    assert run("cache", "import", "all.jsonl")[1] == "1 added\n"


def test_what_a_file_calls_optimal_is_proven_here_or_not_said(run, problem):
    """Its bound is its own length; the true optimum is shorter."""
    slow = one_at_a_time(problem)
    proud = ScheduleFile.from_schedule(slow, "optimal", slow.makespan_ms)
    proud.save("proud.json")
    assert run("cache", "add", "proud.json")[1].startswith("1 added")
    run("cache", "export", "all.jsonl")
    line = json.loads(Path("all.jsonl").read_text()) | {"status": "optimal", "lower_bound_ms": slow.makespan_ms}
    for words in (("add", "proud.json"), ("import", "told.jsonl")):
        run("cache", "prune", "0")
        Path("told.jsonl").write_text(json.dumps(line))
        run("cache", *words)
        assert "proven optimal" not in run("cache", "lookup", "p.json")[1]
        assert "(cached)" not in run("solve", "p.json")[1]
    for words in (("show", "proud.json", "--html", "s.html"), ("check", "p.json", "proud.json")):
        code, _, err = run(*words)
        assert (code, err.count("is not proven here")) == (0, 1)
    assert f'"lower_bound_ms":{slow.makespan_ms}' not in Path("s.html").read_text()


WRONG = [
    (("solve", "nothing.json"), "error: nothing.json: No such file or directory"),
    (("show", "broken.json", "--before", "p.json"), "error: --before p.json: two schedules are compared on a page, "),
    (("solve", "bad.json", "-o", "s.json"), "error: bad.json: stages[0].forward_ms = -1: "),
    (
        ("solve", "p.json", "-o", "no/such/s.json"),
        "error: no/such/s.json: cannot be written: No such file or directory",
    ),
    (("solve", "p.json", "--time-limit", "-1"), "error: --time-limit = -1.0: "),
    (
        ("solve", "p.json", "--solver", "best"),
        "error: --solver = 'best': auto, highs, gurobi, pulp or one of PuLP's solvers such as pulp:cbc was expected ",
    ),
    (
        ("solve", "p.json", "--warm-start", "p.json"),
        "error: p.json is a problem, a schedule is expected: make one with optpipe solve p.json -o S.json",
    ),
    (("check", "p.json", "p.json"), "error: p.json is a problem, a schedule is expected: "),
    (("solve", "broken.json"), "error: broken.json is a schedule, a problem is expected: "),
    (("solve", "p.json", "-o", "a" * 300), f"error: {'a' * 300}: File name too long"),
    (("cache", "add", "proud.json"), "error: proud.json: status = 'optimal': lower_bound_ms = None does not prove it"),
    (("show", "twisted.json"), "error: programs[0]: op '0X0': "),
    (("cache", "add", "broken.json"), "error: broken.json: not a schedule that runs and fits: 0F2 is missing"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_a_users_mistake_is_one_sentence(run, problem, words, message):
    Path("bad.json").write_text(problem.to_json().replace('"forward_ms": 1.0', '"forward_ms": -1', 1))
    content = json.loads(ScheduleFile.from_schedule(one_at_a_time(problem)).to_json())
    content["devices"][0]["program"][0] = "0X0"
    Path("proud.json").write_text(
        json.dumps(json.loads(ScheduleFile.from_schedule(one_at_a_time(problem)).to_json()) | {"status": "optimal"})
    )
    Path("twisted.json").write_text(json.dumps(content))
    content["devices"][0]["program"] = [f"0{kind}{j}" for j in range(2) for kind in ("F", "B", "W")]
    Path("broken.json").write_text(json.dumps(content))
    code, out, err = run(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(message)
    assert not Path("s.json").exists()


def test_help_is_quick_and_imports_nothing_heavy():
    code = (
        "import sys, time; began = time.perf_counter(); sys.argv = ['optpipe', '--help']\n"
        "from optpipe_cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'numpy', 'ortools', 'highspy', 'numba', 'fastapi', 'pydantic') if m in "
        "sys.modules])"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")
    assert time.monotonic() - began < 10  # the goal, half a second, is measured by hand: machines are noisy


def test_with_jitter_the_percentile_counts_and_proves_nothing(run, problem):
    figures = json.loads(run("solve", "p.json", "--method", "good", "--jitter", "0.1", "--json")[1])
    assert (figures["status"], figures["makespan_ms"]) == ("feasible", all_forwards_first(problem).makespan_ms)
    assert figures["percentile_ms"] == figures["incumbents"][-1]["value_ms"] > figures["makespan_ms"]
    code, out, _ = run("solve", "p.json", "--method", "good", "--jitter", "0.1")
    assert code == 0
    assert f"with noise within {figures['percentile_ms']:.6g} ms in 95% of all iterations" in out
    run("solve", "p.json", "--method", "good")  # proven without noise, and cached
    assert "(cached)" not in run("solve", "p.json", "--jitter", "0.1", "--method", "auto")[1]
