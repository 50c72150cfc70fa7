"""What the cache has for problems like one that was solved, and among many."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.problems import pipeline, stage

from benchmarks import reuse
from benchmarks.results_file import Results
from optpipe import anytime
from optpipe.options import SolveOptions

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("leaves", [True, False])
def test_searches_that_count_have_the_same_rows_everywhere(leaves, bench, tmp_path, monkeypatch: pytest.MonkeyPatch):
    path, results = tmp_path / "problem.json", tmp_path / "results.jsonl"
    each = stage((2, 1, 1), (1, 1), **({"offload": (1, 1, 1)} if leaves else {}))
    pipeline(2, 4, 2, each, name="small").save(path)
    monkeypatch.setattr(reuse, "WORK", 1000)
    runs = []
    for _ in range(1 + leaves):
        results.unlink(missing_ok=True)
        assert bench("reuse", path, "--work", 5, "--results", results).code == 0
        rows = Results(results, "reuse", ("problem", "changed"), SolveOptions(), work=5).rows
        runs.append([row | {"lookup_ms": 0} for row in rows])
    assert runs[0] == runs[-1]
    assert [row["changed"] for row in rows] == [each for each in reuse.CHANGES if leaves or "links" not in each]
    for row in rows:
        assert 0 <= row["loss_searched"] <= row["loss"]
        assert row["gap"] >= 0


def test_only_some_changes_are_measured(bench, tmp_path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "problem.json"
    pipeline(2, 4, 2, stage((2, 1, 1), (1, 1)), name="small").save(path)
    monkeypatch.setattr(reuse, "WORK", 1000)
    words = ("reuse", path, "--work", 1, "--changed", "a quarter fewer", "--changed", "half the memory")
    lines = bench(*words).out.splitlines()
    assert [line[22:44].strip() for line in lines if line.startswith("small")] == ["half the memory", "a quarter fewer"]
    _, _, err = bench(*words, "--changed", "twice the memory")
    assert "--changed = 'twice the memory': unknown; expected one of 'times by a tenth'" in err


@pytest.mark.soak  # 45 solver processes
def test_what_the_cache_has_is_compared_with_a_search(bench, tmp_path, monkeypatch: pytest.MonkeyPatch):
    """The solver answers with all forwards first, which is as good as what is adapted to other times and numbers."""
    path, results = tmp_path / "problem.json", tmp_path / "results.jsonl"
    pipeline(2, 4, 10, stage((2, 1, 1), (1, 1)), name="small").save(path)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setattr(anytime, "SOLVER", "support.scripted_solver")
    bench("reuse", path, "--method", "good", "--results", results)
    rows = Results(results, "reuse", ("problem", "changed"), SolveOptions(method="good"), work=None).rows
    assert [row["changed"] for row in rows] == [each for each in reuse.CHANGES if "links" not in each]
    assert all(row["loss"] <= 1e-9 and row["lookup_ms"] > 0 for row in rows)


def test_what_is_near_is_found_among_many(bench):
    out = bench("cache", "--entries", 50, "--lookups", 3).out
    assert "nearest of 50 problems: median " in out
    assert "3 ordinary problems, first lookup with the pack: " in out
