"""Steps with exactly one fault: it is named, nothing else is, and the parts are the step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from support.examples import examples
from support.traces.faults import Job, jobs, recorded

from optpipe.diagnose import collect_runs, explain


@settings(max_examples=examples(60), deadline=None)
@given(jobs())
def test_one_fault_is_named_and_nothing_else(job: Job) -> None:
    losses = explain(collect_runs(recorded(job)))
    assert losses.replay_error < 0.005
    assert sum(part.ms for part in losses.parts) == pytest.approx(losses.measured_ms, rel=1e-12)
    named = {part.name for part in losses.causes}
    assert named <= {job.fault}
    if job.fault in ("slow-device", "stages", "order"):
        assert named == {job.fault}
    slow = [(each.replica, each.device, each.first_step, each.since) for each in losses.slow_devices]
    if job.fault == "slow-device":
        assert slow == [(job.replica, job.place, job.since, job.since > 0)]
        assert losses.slow_devices[0].factor == pytest.approx(job.factor, rel=0.02)
    else:
        assert slow == []
    assert [s for s, _ in losses.uneven_stages] == ([job.place] if job.fault == "stages" else [])
