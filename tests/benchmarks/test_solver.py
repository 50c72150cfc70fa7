"""The searches of `solver`, `first` and `pareto`, and the random problems."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import solver
from benchmarks.pareto import verdicts
from benchmarks.random_problems import KINDS, random_problem
from benchmarks.solver import EACH, comparison
from optpipe import Problem, Result
from optpipe.comparison import Comparison, Row
from optpipe.options import CompareOptions, SearchOptions
from optpipe_solver import systems
from optpipe_solver.bounds.least_memory import infeasibility

EXAMPLES = Path(__file__).parents[2] / "examples" / "problems"
FASTLINK = EXAMPLES / "fastlink-4x8.json"


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
def test_each_change_has_its_search(words, searched, names, bench, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def solve(problem: Problem, **options: object) -> Result:
        asked.append(tuple(options.get(name) for name in EACH))
        return Result("unknown", reason="not searched")

    monkeypatch.setattr(solver, "solve", solve)
    lines = bench("solver", "--random", 1, *words).out.splitlines()
    assert asked == searched
    assert [line.partition("  by ")[2].strip() for line in lines if "  by" in line] == names


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("solver",), "problem files or --random 22 were expected"),
        (("solver", "--random", 1, "--against", "method=foo"), "method = 'foo': the methods are auto, "),
        (("solver", "--random", 1, "--against", "gap=1"), "--against = 'gap=1': method, time_limit_s, threads, seed "),
        (("pareto", FASTLINK, "--budgets", "half"), "budgets: 'half': expected shares of M above 0, or ample"),
        (("pareto", FASTLINK, "--budgets", "1,-2"), "budgets: '-2': expected shares"),
    ],
)
def test_a_mistake_is_one_sentence_before_the_first_search(words, told, bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(solver, "solve", None)
    code, out, err = bench(*words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert told in err


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
