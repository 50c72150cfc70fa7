"""The table of public traces: the page has what the results say, and a folder is diagnosed once."""

from __future__ import annotations

from pathlib import Path

from support.traces.timelines import saved, timeline

ROOT = Path(__file__).parents[2]


def test_the_page_has_what_the_results_say(bench):
    code, out, err = bench("corpus", "--results", ROOT / "benchmarks/results/corpus.jsonl")
    assert code == 0, err
    page = (ROOT / "docs/diagnose.md").read_text(encoding="utf-8").splitlines()
    rows = [row for row in out.splitlines() if row.startswith("| ")]
    assert len(rows) > 5
    assert set(rows) <= set(page)


def test_a_folder_is_diagnosed_once(bench, tmp_path):
    saved(timeline(), tmp_path)
    results = tmp_path / "results.jsonl"
    code, out, err = bench("corpus", tmp_path, "--results", results)
    assert code == 0, err
    assert "| timeline | 2 | 2 | " in out
    (tmp_path / "timeline.json").unlink()
    assert bench("corpus", "--results", results).out == out
    code, _, err = bench("corpus", tmp_path / "none")
    assert code == 2
    assert "no traces: files named .json" in err
