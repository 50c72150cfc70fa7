"""Runs of benchmarks in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from benchmarks.__main__ import main


class Run(NamedTuple):
    code: int
    out: str
    err: str


Bench = Callable[..., Run]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    """`python -m benchmarks` with these words."""

    def run(*words: object) -> Run:
        monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Run(int(ended.value.code or 0), printed.out, printed.err)

    return run
