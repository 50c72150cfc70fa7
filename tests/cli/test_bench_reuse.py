"""`optpipe bench reuse`: what the cache has for problems like one that was solved."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.problems import pipeline, stage

from optpipe import anytime
from optpipe_cli import main as cli
from optpipe_cli.bench import reuse

TESTS = Path(__file__).parents[1]


CHANGED = [
    "times by a tenth",
    "times by a fifth",
    "times by two fifths",
    "links a third slower",
    "links half as fast",
    "longer backwards",
    "a tenth less memory",
    "a fifth less memory",
    "half the memory",
    "a quarter more memory",
    "one micro-batch more",
    "half as many more",
    "a quarter fewer",
    "one device more",
    "one device fewer",
]


@pytest.mark.parametrize("leaves", [True, False])
def test_searches_that_count_have_the_same_table_everywhere(
    leaves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "problem.json"
    each = stage((2, 1, 1), (1, 1), **({"offload": (1, 1, 1)} if leaves else {}))
    pipeline(2, 4, 2, each, name="small").save(path)
    monkeypatch.setattr(reuse, "WORK", 1000)
    monkeypatch.setattr(sys, "argv", ["optpipe", "bench", "reuse", str(path), "--work", "5", "--json"])
    tables = []
    for _ in range(1 + leaves):
        with pytest.raises(SystemExit):
            cli.main()
        tables.append([row | {"lookup_ms": 0} for row in json.loads(capsys.readouterr().out)])
    assert tables[0] == tables[-1]
    assert [row["changed"] for row in tables[0]] == [each for each in CHANGED if leaves or "links" not in each]
    for row in tables[0]:
        assert 0 <= row["loss_searched"] <= row["loss"]
        assert row["gap"] >= 0


def test_only_some_changes_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "problem.json"
    pipeline(2, 4, 2, stage((2, 1, 1), (1, 1)), name="small").save(path)
    monkeypatch.setattr(reuse, "WORK", 1000)
    monkeypatch.setattr(sys, "argv", ["optpipe", "bench", "reuse", str(path), "--work", "1", "--json"])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--changed", "a quarter fewer", "--changed", "half the memory"])
    with pytest.raises(SystemExit):
        cli.main()
    rows = json.loads(capsys.readouterr().out)
    assert [row["changed"] for row in rows] == ["half the memory", "a quarter fewer"]
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--changed", "twice the memory"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code
    assert "--changed = 'twice the memory': unknown; expected one of 'times by a tenth'" in capsys.readouterr().err


@pytest.mark.soak  # 45 solver processes
def test_what_the_cache_has_is_compared_with_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The solver answers with all forwards first, which is as good as what is adapted to other times and numbers."""
    path = tmp_path / "problem.json"
    pipeline(2, 4, 10, stage((2, 1, 1), (1, 1)), name="small").save(path)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setattr(anytime, "SOLVER", "support.scripted_solver")
    monkeypatch.setattr(sys, "argv", ["optpipe", "bench", "reuse", str(path), "--method", "good", "--json"])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--results", str(tmp_path / "results.jsonl")])
    with pytest.raises(SystemExit):
        cli.main()
    rows = json.loads(capsys.readouterr().out)
    assert [row["changed"] for row in rows] == [each for each in CHANGED if "links" not in each]
    with pytest.raises(SystemExit):
        cli.main()
    assert json.loads(capsys.readouterr().out) == rows, "nothing is measured twice"
    assert all(row["loss"] <= 1e-9 and row["lookup_ms"] > 0 for row in rows)
