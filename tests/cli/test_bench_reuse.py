"""`optpipe bench reuse`: what the cache has for problems like one that was solved."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.problems import pipeline, stage

from optpipe import anytime
from optpipe_cli import main as cli

TESTS = Path(__file__).parents[1]


@pytest.mark.soak  # eleven solver processes
def test_what_the_cache_has_is_compared_with_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The solver answers with all forwards first, which is as good as what is adapted to other times and numbers."""
    path = tmp_path / "problem.json"
    pipeline(2, 4, 10, stage((2, 1, 1), (1, 1)), name="small").save(path)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setattr(anytime, "SOLVER", "support.scripted_solver")
    monkeypatch.setattr(sys, "argv", ["optpipe", "bench", "reuse", str(path), "--method", "good", "--json"])
    with pytest.raises(SystemExit):
        cli.main()
    rows = json.loads(capsys.readouterr().out)
    assert [row["changed"] for row in rows] == [
        "times by a tenth",
        "a fifth less memory",
        "one micro-batch more",
        "half as many more",
        "a quarter fewer",
    ]
    assert all(row["loss"] <= 1e-9 and row["lookup_ms"] > 0 for row in rows)
