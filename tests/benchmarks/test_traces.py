"""Timelines replayed with their own times, and diagnosed. Public ones are no part of the repository: the folder that
OPTPIPE_TRACES names has them."""

import os
import re
from pathlib import Path

import pytest
from support.traces.timelines import STEPS, ran, saved, timeline

TRACES = os.environ.get("OPTPIPE_TRACES")


def test_the_slowest_replica_of_each_step_counts_and_is_not_read_again(bench, tmp_path):
    saved(timeline(), tmp_path)
    results = tmp_path / "results.jsonl"
    code, out, err = bench("traces", tmp_path, "--gains", "timeline", "--results", results)
    assert code == 0, err
    step_ms = sum(max(ran(step, replica).makespan_ms for replica in range(2)) for step in STEPS) / 2
    assert f"| timeline | 2 | 2 | 0.50 | {step_ms:.0f} | 0.00% | 0.00% |" in out
    gains = [[float(text) for text in re.findall(r"(\d\.\d\d) \(", row)] for row in out.splitlines()[-4:]]
    assert all(0.99 <= gain <= bound for row in gains for gain, bound in (row[:2], row[2:]))
    (tmp_path / "timeline.json").unlink()
    assert bench("traces", "--results", results).out == out


def test_a_mistake_is_one_sentence(bench, tmp_path):
    (tmp_path / "some").mkdir()
    saved(timeline(), tmp_path / "some")
    for words, message in (
        (("traces", tmp_path), "no timelines: files named"),
        (("traces", tmp_path / "some", "--gains", "AB"), "--gains = 'AB': expected one of t"),
        (("corpus", tmp_path / "none"), "no traces: files named .json"),
    ):
        code, _, err = bench(*words)
        assert code == 2
        assert message in err


@pytest.mark.parametrize(("name", "page", "least"), [("traces", "fidelity", 7), ("corpus", "diagnose", 6)])
def test_the_page_has_what_the_results_say(name, page, least, bench):
    root = Path(__file__).parents[2]
    code, out, err = bench(name, "--results", root / f"benchmarks/results/{name}.jsonl")
    assert code == 0, err
    rows = [row for row in out.splitlines() if row.startswith("| ")]
    assert len(rows) >= least
    assert set(rows) <= {*(root / f"docs/{page}.md").read_text(encoding="utf-8").splitlines()}


def test_a_folder_is_diagnosed_once(bench, tmp_path):
    saved(timeline(), tmp_path)
    results = tmp_path / "results.jsonl"
    code, out, err = bench("corpus", tmp_path, "--results", results)
    assert code == 0, err
    assert "| timeline | 2 | 2 | " in out
    (tmp_path / "timeline.json").unlink()
    assert bench("corpus", "--results", results).out == out


@pytest.mark.skipif(TRACES is None, reason="OPTPIPE_TRACES names no folder")
def test_public_steps_are_replayed_within_one_per_cent(bench, tmp_path):
    for n, path in enumerate(sorted(Path(TRACES).glob("timeline-*.json.gz"))):
        (tmp_path / f"job{n}.json.gz").symlink_to(path)
    code, out, err = bench("traces", tmp_path)
    assert code == 0, err
    errors = [float(row.split(" | ")[5].rstrip("%")) for row in out.splitlines() if row.startswith("| job")]
    assert errors
    assert max(errors) <= 1
