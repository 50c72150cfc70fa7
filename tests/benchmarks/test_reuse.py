"""What the cache has for problems like one that was solved."""

from __future__ import annotations

from support.problems import pipeline, stage

from benchmarks import reuse
from benchmarks.results_file import Results
from optpipe import Result
from optpipe.model.problem import Problem
from optpipe.options import SearchOptions, SolveOptions
from optpipe.reuse import by_rules
from optpipe.schedule import Schedule


def test_what_the_cache_has_is_compared_with_searches(bench, tmp_path, monkeypatch):
    """Searches are among the rules of a list scheduler, in this process."""

    def solve(problem: Problem, warm_start: Schedule | None, **_: object) -> Result:
        return Result.from_schedule(by_rules(problem, warm_start, "makespan", 1000), SearchOptions(), 1.0)

    monkeypatch.setattr(reuse, "solve", solve)
    path, results = tmp_path / "problem.json", tmp_path / "results.jsonl"
    pipeline(2, 4, 2, stage((2, 1, 1), (1, 1)), name="small").save(path)
    assert bench("reuse", path, "--results", results).code == 0
    rows = Results(results, "reuse", ("problem", "changed"), SolveOptions()).rows
    assert [row["changed"] for row in rows] == [each for each in reuse.CHANGES if "links" not in each]
    assert all(row["loss"] >= 0 and row["lookup_ms"] > 0 for row in rows)
    words = ("reuse", path, "--changed", "a quarter fewer", "--changed", "half the memory")
    lines = bench(*words).out.splitlines()
    assert [line[22:44].strip() for line in lines if line.startswith("small")] == ["half the memory", "a quarter fewer"]
    told = bench(*words, "--changed", "twice the memory").err
    assert "--changed = 'twice the memory': unknown; expected one of 'times by a tenth'" in told


def test_a_fresh_install_finds_ordinary_problems(bench):
    out = bench("cache", "--lookups", 3).out
    assert "3 ordinary problems, first lookup with the pack: " in out
