"""Public traces, which are no part of the repository: the folder that OPTPIPE_TRACES names has them."""

import os
from pathlib import Path

import numpy as np
import pytest

from optpipe.diagnose import Change, Diagnosis, UserFacts, batch_of, diagnose

TRACES = Path(os.environ.get("OPTPIPE_TRACES", "/nowhere"))
# What the analysis published with each timeline found, the largest first.
PUBLISHED = {"AR": ["slow-device"], "SE": ["replicas", "stages", "micro-batches"], "ST": ["stages"]}


def found(name: str) -> Diagnosis:
    if not (TRACES / name).exists():
        pytest.skip(f"OPTPIPE_TRACES names no folder with {name}")
    return diagnose(TRACES / name, time_limit_s=0.0)


@pytest.mark.parametrize("job", PUBLISHED)
def test_causes_are_those_that_were_published(job: str) -> None:
    losses = found(f"timeline-{job}.json.gz").losses
    assert [part.name for part in losses.causes] == PUBLISHED[job]
    assert losses.replay_error < 0.01
    assert sum(part.ms for part in losses.parts) == pytest.approx(losses.measured_ms, rel=1e-12)
    slow = [(each.replica, each.device) for each in losses.slow_devices]
    assert slow == ([(0, 0)] if job == "AR" else [])


def test_two_chunks_are_predicted_from_one() -> None:
    one, two = found("pp8"), found("pp8_vpp2")
    assert max(one.losses.replay_error, two.losses.replay_error) < 0.01
    (chunks,) = (cure.schedule for cure in one.cures.cures if cure.name == "chunks")
    change = Change(placement=chunks.placement, schedule=chunks)
    steps = one.runs.steps.tolist()
    ms = [batch_of(one.runs, one.losses.healthy_ms, step, UserFacts()).predict(change).ms for step in steps]
    assert np.mean(ms) == pytest.approx(two.losses.measured_ms.mean(), rel=0.02)
    assert np.median(ms) == pytest.approx(np.median(two.losses.measured_ms), rel=0.02)
