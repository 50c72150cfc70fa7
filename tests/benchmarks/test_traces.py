"""Timelines replayed with their own times, and diagnosed. Public ones are no part of the repository: the folder that
OPTPIPE_TRACES names has them."""

import os
import re
from pathlib import Path

import pytest
from support.traces.timelines import STEPS, ran, saved, timeline

TRACES = os.environ.get("OPTPIPE_TRACES")


def test_the_slowest_replica_of_each_step_counts_and_nothing_is_read_again(bench, tmp_path):
    saved(timeline(), tmp_path)
    step_ms = sum(max(ran(step, replica).makespan_ms for replica in range(2)) for step in STEPS) / 2
    printed = {}
    for name, words, row in (
        ("traces", ("--gains", "timeline"), f"| timeline | 2 | 2 | 0.50 | {step_ms:.0f} | 0.00% | 0.00% |"),
        ("corpus", (), "| timeline | 2 | 2 | "),
    ):
        code, printed[name], err = bench(name, tmp_path, *words, "--results", tmp_path / name)
        assert code == 0, err
        assert row in printed[name]
    gains = [[float(text) for text in re.findall(r"(\d\.\d\d) \(", row)] for row in printed["traces"].splitlines()[-4:]]
    assert all(0.99 <= gain <= bound for row in gains for gain, bound in (row[:2], row[2:]))
    (tmp_path / "timeline.json").unlink()
    assert {name: bench(name, "--results", tmp_path / name).out for name in printed} == printed


@pytest.mark.skipif(TRACES is None, reason="OPTPIPE_TRACES names no folder")
def test_public_steps_are_replayed_within_one_per_cent(bench, tmp_path):
    for n, path in enumerate(sorted(Path(TRACES).glob("timeline-*.json.gz"))):
        (tmp_path / f"job{n}.json.gz").symlink_to(path)
    code, out, err = bench("traces", tmp_path)
    assert code == 0, err
    errors = [float(row.split(" | ")[5].rstrip("%")) for row in out.splitlines() if row.startswith("| job")]
    assert errors
    assert max(errors) <= 1
