"""`optpipe bench solver --random N`: the problems that it solves, and the gaps that it prints."""

from __future__ import annotations

import json
import sys

import pytest

from optpipe.anytime import Result
from optpipe.model.problem import Problem
from optpipe_cli import main as cli
from optpipe_cli.bench.random_problems import KINDS, random_problem
from optpipe_cli.bench.solver import EACH, _compared, _gaps
from optpipe_solver.bounds.least_memory import infeasibility

FOUR_OF_EACH = range(4 * len(KINDS))


def test_every_problem_has_a_schedule_and_every_kind_has_its_turn() -> None:
    problems = [random_problem(number) for number in FOUR_OF_EACH]
    assert [infeasibility(problem) for problem in problems] == [None] * len(problems)
    assert [problem.name.partition("-")[0] for problem in problems] == 4 * list(KINDS)
    assert len({problem.sha256 for problem in problems}) == len(problems)


def test_a_number_is_always_the_same_problem() -> None:
    for number in FOUR_OF_EACH:
        assert random_problem(number) == random_problem(number)


def test_a_kind_is_what_its_name_says() -> None:
    by_kind = dict(zip(KINDS, map(random_problem, range(len(KINDS))), strict=True))
    assert not any(stage.can_offload or stage.can_recompute for stage in by_kind["stays"].stages)
    assert all(stage.can_offload and stage.can_recompute for stage in by_kind["either"].stages)
    assert all(stage.offload_parts > 1 for stage in by_kind["parts"].stages)
    assert by_kind["duplex"].transfer_mode == "full_duplex"
    assert by_kind["shared"].shared_links
    assert len({stage.forward_ms for stage in by_kind["uneven"].stages}) > 1
    assert len(by_kind["chunks"].stages) == 2 * len(by_kind["chunks"].devices)
    assert len(by_kind["few"].devices) == 16


def test_gaps_are_told_by_kind_and_of_all() -> None:
    gaps = [("few-16x48-10", 0.2), ("stays-2x5-0", 0.0), ("few-16x20-21", 0.1), ("parts-2x3-3", None)]
    lines = _gaps([{"problem": name, "gap": gap} for name, gap in gaps]).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["few", "2", "0", "15.0%", "20.0%"],
        ["stays", "1", "1", "0.0%", "0.0%"],
        ["all", "3", "1", "10.0%", "20.0%"],
    ]


def test_searches_are_compared_with_the_first() -> None:
    found = [
        ("auto", "a", 0.1, 100.0),
        ("auto", "b", None, None),
        ("auto", "c", 0.0, 50.0),
        ("lns", "a", 0.0, 90.0),
        ("lns", "b", 0.5, 80.0),
        ("lns", "c", 0.2, 55.0),
    ]
    rows = [dict(zip(("search", "sha256", "gap", "best_ms"), each, strict=True)) for each in found]
    assert [line.split() for line in _compared(rows).splitlines()[1:]] == [
        ["auto", "2", "1", "5.0%", "100.00%", "0", "0.00%"],
        ["lns", "2", "1", "10.0%", "100.00%", "1", "10.00%"],
    ]
    assert len(_compared(rows[1:2]).splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "searched"),
    [
        ({"--threads": "2,4"}, [("auto", 60.0, 2, 0), ("auto", 60.0, 4, 0)]),
        ({"--threads": "3"}, [("auto", 60.0, 3, 0)]),
        (
            {"--method": "auto,gis:group=5", "--seed": "1,2", "--time-limit": "9"},
            [
                ("auto", 9.0, None, 1),
                ("auto", 9.0, None, 2),
                ("gis:group=5", 9.0, None, 1),
                ("gis:group=5", 9.0, None, 2),
            ],
        ),
    ],
)
def test_each_combination_has_its_search(
    given: dict[str, str],
    searched: list[tuple[object, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[tuple[object, ...]] = []

    def solve(problem: Problem, **options: object) -> Result:
        asked.append(tuple(options.get(name) for name in EACH))
        return Result("unknown", reason="not searched")

    monkeypatch.setattr("optpipe.anytime.solve", solve)
    arguments = [word for pair in given.items() for word in pair]
    monkeypatch.setattr(sys, "argv", ["optpipe", "bench", "solver", "--random", "1", *arguments, "--json"])
    with pytest.raises(SystemExit):
        cli.main()
    rows = json.loads(capsys.readouterr().out)
    assert asked == [tuple(row[f"asked_{name}"] for name in EACH) for row in rows] == searched


def test_a_search_is_named_by_what_tells_it_from_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("optpipe.anytime.solve", lambda problem, **_: Result("unknown", reason="not searched"))
    arguments = ["--random", "1", "--method", "auto,lns", "--time-limit", "1,2"]
    monkeypatch.setattr(sys, "argv", ["optpipe", "bench", "solver", *arguments])
    with pytest.raises(SystemExit):
        cli.main()
    heads = [line.partition("  by ")[2] for line in capsys.readouterr().out.splitlines() if "  by " in line]
    assert heads == [f"{method}, time-limit {limit}" for method in ("auto", "lns") for limit in (1, 2)]


def test_without_problems_a_sentence_says_what_was_expected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["optpipe", "bench", "solver"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code
    assert "problem files or --random 22 were expected" in capsys.readouterr().err


def test_an_unknown_method_is_refused_before_the_first_search(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("optpipe.anytime.solve", None)
    monkeypatch.setattr(sys, "argv", ["optpipe", "bench", "solver", "--random", "1", "--method", "auto,foo"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code
    said = capsys.readouterr()
    assert (said.out, said.err.partition(":")[0]) == ("", "error")
    assert "method = 'foo': the methods are auto, " in said.err
