"""A wrong argument ends in one sentence that names it as the caller did."""

from __future__ import annotations

from typing import Any

import pytest
from support.problems.chain import chain

import optpipe

PROBLEM = chain()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"time_limit_s": 0}, "improve: time_limit_s = 0: input should be greater than 0"),
        ({"time_limit": 5}, "improve: time_limit is not an option; did you mean time_limit_s?"),
        ({"color": 5}, "improve: color is not an option; expected time_limit_s, gap, "),
        ({"threads": 0}, "improve: threads = 0: input should be greater than or equal to 1"),
        (
            {"warm_start": "s.json"},
            "warm_start is of type str: a Schedule was expected (Schedule.load reads a file)",
        ),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(optpipe.InputError) as raised:
        optpipe.improve(PROBLEM, **arguments)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)
