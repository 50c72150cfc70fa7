"""Evictions between two ranks: gradients are those of a plain run, and the bytes really move to the other rank."""

from __future__ import annotations

import pytest
from support.ranks import cases
from support.ranks.calls import same
from support.ranks.worker import Ranks

from optpipe.errors import ScheduleError
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, certify
from optpipe_runtime import Layout
from optpipe_runtime.features.evictions import require_peers

# rank 0 has two activations at most, two wait on rank 1, whose rooms are made in another order than they are used
BPIPE = [
    ["0F0", "0E0", "0F1", "0D0", "0E1", "0F2", "0D1", "0L0", "0B0", "0W0", "0L1", "0BW1", "0F3", "0BW2", "0BW3"],
    ["0A1", "0A0", "1F0", "1BW0", "1F1", "1B1", "0V0", "1W1", "0V1", "1F2", "1BW2", "1F3", "1BW3"],
]


def test_same_bits_as_plain_autograd(ranks: Ranks) -> None:
    same(ranks, [0, 1], [BPIPE], peers=[1, None])


def test_evicted_bytes_are_on_the_peer(ranks: Ranks) -> None:
    """Three of the first rank's activations at once without eviction; with it two at most, the others beside the peer's
    own."""
    problem: Problem = ranks(cases.measure, placement=[0, 1], microbatches=4, offload_parts=1, peers=[1, None])[0]
    stays = [[text for text in program if text[1] not in "EDLAV"] for program in BPIPE]
    evicting, plain = Schedule.parse(problem, BPIPE), Schedule.parse(problem, stays)
    results = ranks(cases.train, placement=[0, 1], schedules=[evicting, plain])
    for rank, ((found, other), _) in enumerate(results):
        assert found.peak_activation_bytes <= certify(problem, evicting).device[rank].bytes
        assert other.peak_activation_bytes <= certify(problem, plain).device[rank].bytes
    ((here, before), _), ((there, alone), _) = results
    evicted = problem.stages[0].evict_bytes or 0
    assert evicted > 0.5 * problem.stages[0].activation_bytes
    assert here.peak_activation_bytes <= before.peak_activation_bytes - evicted
    assert there.peak_activation_bytes >= alone.peak_activation_bytes + 2 * evicted


def test_a_pipeline_without_the_peer_refuses_the_schedule() -> None:
    problem = cases.problem([0, 1], 4, [1, None])
    schedule = Schedule.parse(problem, BPIPE)
    assert any(op.kind == Kind.E for op in schedule.programs[0].ops())
    with pytest.raises(
        ScheduleError, match="evicts from device 0 to device 1, in this pipeline the peer of rank 0 is None"
    ):
        require_peers(schedule, Layout.make([0, 1], 4))
