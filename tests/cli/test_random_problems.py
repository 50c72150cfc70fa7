"""`optpipe bench solver --random N`: the problems that it solves, and the gaps that it prints."""

from __future__ import annotations

import json
import sys

import pytest

from optpipe.anytime import Result
from optpipe.model.problem import Problem
from optpipe_cli import main as cli
from optpipe_cli.bench.random_problems import KINDS, random_problem
from optpipe_cli.bench.solver import _by_threads, _gaps
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


def test_more_threads_are_compared_with_the_first_number() -> None:
    found = [(2, "a", 0.1, 100.0), (2, "b", None, None), (4, "a", 0.0, 90.0), (4, "b", 0.5, 80.0)]
    rows = [dict(zip(("threads", "problem", "gap", "best_ms"), each, strict=True)) for each in found]
    assert [line.split() for line in _by_threads(rows).splitlines()[1:]] == [
        ["2", "1", "0", "10.0%", "100.00%"],
        ["4", "1", "1", "0.0%", "90.00%"],
    ]


@pytest.mark.parametrize(("threads", "searched"), [("2,4", [2, 4]), ("3", [3])])
def test_each_number_of_threads_has_its_search(
    threads: str, searched: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def solve(problem: Problem, *, threads: int, **_: object) -> Result:
        asked.append(threads)
        return Result("unknown", reason="not searched")

    monkeypatch.setattr("optpipe.anytime.solve", solve)
    monkeypatch.setattr(sys, "argv", ["optpipe", "bench", "solver", "--random", "1", "--threads", threads, "--json"])
    with pytest.raises(SystemExit):
        cli.main()
    assert asked == [row["threads"] for row in json.loads(capsys.readouterr().out)] == searched


def test_without_problems_a_sentence_says_what_was_expected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["optpipe", "bench", "solver"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code
    assert "problem files or --random 22 were expected" in capsys.readouterr().err
