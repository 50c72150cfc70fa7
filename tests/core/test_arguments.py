"""What a user hands to `improve` by mistake ends in one sentence that names it as he did."""

from __future__ import annotations

from typing import Any

import pytest
from support.chain import chain
from typer.testing import CliRunner

import optpipe
from optpipe_cli.main import app

PROBLEM = chain()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"time_limit": 0}, "improve: time_limit = 0: input should be greater than 0"),
        (
            {"time_limit": "soon"},
            "improve: time_limit = 'soon': input should be a valid number, unable to parse string as a number",
        ),
        (
            {"time_limit": "time_limit_s"},
            "improve: time_limit = 'time_limit_s': input should be a valid number, unable to parse string as",
        ),
        ({"threads": 0}, "improve: threads = 0: input should be greater than or equal to 1"),
        (
            {"warm_start": "s.json"},
            "improve: warm_start is of type str: a Schedule was expected (Schedule.load reads a file)",
        ),
        ({"warm_start": ""}, "improve: warm_start is of type str: a Schedule was expected"),
        ({"warm_start": PROBLEM}, "improve: warm_start is of type Problem: a Schedule was expected"),
    ],
)
def test_an_argument_that_cannot_be(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(optpipe.InputError) as raised:
        optpipe.improve(PROBLEM, **asked)
    assert str(raised.value).startswith(told)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--time-limit", "0", "--time-limit = 0.0: input should be greater than 0"),
        ("--memory-mib", "1", "--memory-mib = 1: input should be greater than or equal to 64"),
        ("--solver", "best", "--solver = 'best': auto, highs, gurobi, pulp or pulp:NAME was expected"),
    ],
)
def test_an_option_that_cannot_be(option: str, value: str, told: str, tmp_path: Any) -> None:
    PROBLEM.save(tmp_path / "p.json")
    result = CliRunner().invoke(app, ["solve", str(tmp_path / "p.json"), option, value, "--no-cache"])
    assert isinstance(result.exception, optpipe.InputError)
    assert str(result.exception) == told
