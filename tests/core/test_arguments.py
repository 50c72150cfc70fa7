"""A wrong argument ends in one sentence that names it as the caller did."""

from __future__ import annotations

from typing import Any

import pytest
from support.chain import chain
from typer.testing import CliRunner

import optpipe
from optpipe_cli.app import app

PROBLEM = chain()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"time_limit_s": 0}, "improve: time_limit_s = 0: input should be greater than 0"),
        ({"time_limit_s": "soon"}, "improve: time_limit_s = 'soon': input should be a valid number"),
        ({"time_limit": 5}, "improve: time_limit is not an option; did you mean time_limit_s?"),
        ({"color": 5}, "improve: color is not an option; expected objective, time_limit_s, "),
        ({"threads": 0}, "improve: threads = 0: input should be greater than or equal to 1"),
        (
            {"warm_start": "s.json"},
            "improve: warm_start is of type str: a Schedule was expected (Schedule.load reads a file)",
        ),
        ({"warm_start": ""}, "improve: warm_start is of type str: a Schedule was expected"),
        ({"warm_start": PROBLEM}, "improve: warm_start is of type Problem: a Schedule was expected"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(optpipe.InputError) as raised:
        optpipe.improve(PROBLEM, **arguments)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--time-limit", "0", "--time-limit = 0.0: input should be greater than 0"),
        ("--memory-mib", "1", "--memory-mib = 1: input should be greater than or equal to 64"),
        ("--solver", "best", "--solver = 'best': auto, highs, gurobi, pulp or one of PuLP's solvers such as pulp:cbc"),
    ],
)
def test_a_wrong_option_is_named(option: str, value: str, message: str, tmp_path: Any) -> None:
    PROBLEM.save(tmp_path / "p.json")
    result = CliRunner().invoke(app, ["solve", str(tmp_path / "p.json"), option, value, "--no-cache"])
    assert isinstance(result.exception, optpipe.InputError)
    assert str(result.exception).startswith(message)
