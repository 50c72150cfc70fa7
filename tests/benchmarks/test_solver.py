"""The searches of `solver`, `first`, `pareto`, `milp` and `reuse`, and the random problems."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.oracles import enumeration
from support.problems import pipeline, stage

from benchmarks import reuse, solver
from benchmarks.milp import LEAST_S, time_to
from benchmarks.pareto import verdicts
from benchmarks.random_problems import KINDS, random_problem
from benchmarks.results_file import KeepOptions, Results
from benchmarks.solver import EACH, comparison
from optpipe import Problem, Result, Schedule
from optpipe.comparison import Comparison, Row
from optpipe.options import CompareOptions, SearchOptions
from optpipe.reuse import by_rules
from optpipe_solver import systems
from optpipe_solver.bounds.least_memory import infeasibility

ROOT = Path(__file__).parents[2]
FASTLINK = ROOT / "examples" / "problems" / "fastlink-4x8.json"
COLUMNS = ("solver", "variables", "rows", "nonzeros", "seconds", "ms", "bound", "gap")


def test_random_problems_have_schedules_and_are_always_the_same():
    problems = [random_problem(number) for number in range(4 * len(KINDS))]
    assert [infeasibility(problem) for problem in problems] == [None] * len(problems)
    assert [problem.name.partition("-")[0] for problem in problems] == 4 * list(KINDS)
    assert len({problem.sha256 for problem in problems}) == len(problems)
    assert [random_problem(number).sha256 for number in range(11)] == [each.sha256 for each in problems[:11]]


def test_searches_are_compared_with_the_first():
    figures = {"auto": [(0.1, 100.0), (None, None), (0.0, 50.0)], "lns": [(0.0, 90.0), (0.5, 80.0), (0.2, 55.0)]}
    rows = [
        {"search": search, "sha256": "abc"[n], "gap": gap, "best_ms": ms}
        for search, each in figures.items()
        for n, (gap, ms) in enumerate(each)
    ]
    assert [line.split() for line in comparison(rows).splitlines()[1:]] == [
        ["auto", "2", "1", "5.0%", "100.00%", "0", "0.00%"],
        ["lns", "2", "1", "10.0%", "100.00%", "1", "10.00%"],
    ]
    assert len(comparison(rows[1:2]).splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "searched", "names"),
    [
        (("--threads", "3"), [("auto", 60.0, 3, 0)], [""]),
        (
            ("--time-limit", "9", "--against", "method=gis:group=5", "--against", "seed=2"),
            [("auto", 9.0, None, 0), ("gis:group=5", 9.0, None, 0), ("auto", 9.0, None, 2)],
            ["auto, seed 0", "gis:group=5, seed 0", "auto, seed 2"],
        ),
    ],
)
def test_each_change_has_its_search_and_what_is_kept_none(words, searched, names, bench, monkeypatch, tmp_path):
    asked = []

    def solve(problem: Problem, **options: object) -> Result:
        asked.append(tuple(options.get(name) for name in EACH))
        return Result("unknown", reason="not searched")

    monkeypatch.setattr(solver, "solve", solve)
    words = ("solver", "--random", 1, *words, "--results", tmp_path / "kept")
    out = bench(*words).out
    assert asked == searched
    assert [line.partition("  by ")[2].strip() for line in out.splitlines() if "  by" in line] == names
    monkeypatch.setattr(solver, "solve", None)
    assert bench(*words).out == out


def test_first_schedules_are_valid(bench):
    out = bench("first", "--devices", 4, "--microbatches", 8).out
    assert "adaoffload" in out
    assert "does not hold" not in out
    assert "4 devices" in bench("core", "--devices", 4, "--microbatches", 8, "--repeats", 1).out


def test_pareto_says_who_is_ahead_at_each_budget_and_draws_it(bench, tmp_path):
    page = tmp_path / "pareto.html"
    code, out, _ = bench("pareto", FASTLINK, "--budgets", 0.5, "--time-limit", 1, "--threads", 2, "--html", page)
    assert code == int("BEHIND" in out)  # in so little time it may be
    # Naive and PO-F need less than the budget, so the solver is also asked there.
    assert re.findall(r"^(.*), any stages: ", out, re.MULTILINE)[-2:] == ["5 GB", "6 GB"]
    assert "0.5 M: 10 GB" in out
    drawn = page.read_text(encoding="utf-8")
    assert all(text in drawn for text in ("po-h: ", '"OptPipe, any stages"', "0.5 M: 10 GB"))


def test_being_behind_is_reported():
    problem = Problem.load(FASTLINK)
    late, soon = (systems.generate(name, problem, "all") for name in ("gpipe", "zb-h2"))
    rows = [
        Row(method, placements, Result.from_schedule(schedule, SearchOptions()), None)
        for method, placements, schedule in (("auto", "all", late), ("auto", "keep", late), ("zb-h2", "all", soon))
    ]
    first, second = verdicts("1 M", Comparison.from_rows(problem, CompareOptions(), rows))
    assert first.solver_is_behind
    assert second.solver_is_behind
    lengths = f"{late.makespan_ms:g} ms against {soon.makespan_ms:g} ms by zb-h2"
    assert first.text == f"1 M, any stages: BEHIND the frontier, {lengths}"
    assert second.text.startswith("1 M, the stages as given: BEHIND ")


def test_what_the_cache_has_is_compared_with_searches(bench, tmp_path, monkeypatch):
    """Searches are among the rules of a list scheduler, in this process."""

    def solve(problem: Problem, warm_start: Schedule | None, **_: object) -> Result:
        return Result.from_schedule(by_rules(problem, warm_start, "makespan", 1000), SearchOptions(), 1.0)

    monkeypatch.setattr(reuse, "solve", solve)
    path, results = tmp_path / "problem.json", tmp_path / "results.jsonl"
    pipeline(2, 4, 2, stage((2, 1, 1), (1, 1)), name="small").save(path)
    assert bench("reuse", path, "--results", results).code == 0
    rows = Results(results, "reuse", ("problem", "changed"), KeepOptions()).rows
    assert [row["changed"] for row in rows] == [each for each in reuse.CHANGES if "links" not in each]
    assert all(row["loss"] >= 0 and row["lookup_ms"] > 0 for row in rows)
    words = ("reuse", path, "--changed", "a quarter fewer", "--changed", "half the memory")
    lines = bench(*words).out.splitlines()
    assert [line[22:44].strip() for line in lines if line.startswith("small")] == ["half the memory", "a quarter fewer"]
    told = bench(*words, "--changed", "twice the memory").err
    assert "--changed = 'twice the memory': unknown; expected one of 'times by a tenth'" in told


def test_a_fresh_install_finds_ordinary_problems(bench):
    out = bench("cache", "--lookups", 3).out
    assert "3 ordinary problems, first lookup with the pack: " in out


def test_every_switch_has_its_row(tmp_path: Path) -> None:
    """In a process of its own: highspy cannot be loaded beside ortools, which other tests use. Times are far too short
    for a proof."""
    stages = [enumeration.stage(d, (10, 10, 8), 5, 2, (12, 12, 5)) for d in range(3)]
    path = tmp_path / "problem.json"
    enumeration.problem_of(stages, [15] * 3, 5).save(path)
    command = [sys.executable, "-m", "benchmarks", "milp", path, "--time-limit", "0.1"]
    _, *lines = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, cwd=ROOT).stdout.splitlines()
    assert {line[:6].strip() for line in lines} == {"2x4"}  # there are 5 micro-batches only
    rows = {line[6:28].strip(): dict(zip(COLUMNS, line[28:].split(), strict=True)) for line in lines}
    assert len(rows) == 14
    assert {row["solver"] for row in rows.values()} == {"HiGHS"}
    for row in rows.values():
        ms = 123.0 if row["ms"] == "–" else float(row["ms"])
        assert float(row["bound"]) <= 123.0 <= ms + 1e-4  # the optimum
    variables = {name: int(row["variables"]) for name, row in rows.items()}
    for name in ("order of entry", "fixed order", "one variable a pair", "no determined ones", "all"):
        assert variables[name] < variables["corrected, no steps"]
    assert int(rows["triangles"]["rows"]) > int(rows["corrected, no steps"]["rows"])
    assert int(rows["all"]["nonzeros"]) < int(rows["corrected, no steps"]["nonzeros"])


def test_two_builds_close_one_gap(tmp_path: Path) -> None:
    """The time that counts is the first at which a search had closed the gap."""
    assert time_to(0.2, [(0.0, 0.5), (1.5, 0.3), (2.5, 0.2), (4.0, 0.1), (5.0, -1.0)]) == 2.5
    options = ["--time-limit", "2", "--repeat", "1", "--first", "1"]
    command = [sys.executable, "-m", "benchmarks", "gaps", ROOT, ROOT, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, cwd=ROOT)
    heading, row, mean = done.stdout.splitlines()
    assert heading.split()[:3] == ["problem", "ops", "gap"]
    name, size, ops, gap, before, _, after, _, ratio = row.split()
    assert (name, size, ops) == ("fastlink-8x16", "4x6", "72")
    assert 0 < float(gap.rstrip("%")) < 100
    before_s, after_s = (max(float(seconds), LEAST_S) for seconds in (before, after))  # 0: with its first schedule
    assert float(ratio) == pytest.approx(after_s / before_s, rel=0.3)
    assert float(mean.removeprefix("geometric mean of ratios: ")) == pytest.approx(float(ratio), abs=0.01)


def test_a_problem_from_which_nothing_can_be_cut_is_refused(bench, tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    for more, message in (
        ({"routes": [[0]]}, "a problem without either was expected"),
        ({}, "2 × 4 at least were expected"),
    ):
        enumeration.problem_of([enumeration.stage(0, (1, 1, 1), 1)], [9], 4, **more).save(path)
        assert message in bench("milp", path).err
    assert "solver = 'foo': auto, highs, gurobi, pulp or one of PuLP's" in bench("milp", path, "--solver", "foo").err
