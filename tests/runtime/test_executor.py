"""Two ranks run schedules on a real model: losses and gradients are those of a plain run, bit by bit if sums have the
same order. With evictions the bytes really move to the other rank."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.close import joined, require_close
from support.examples import examples
from support.problems.strategies import schedules
from support.ranks import cases
from support.ranks.cases import measured, same, train_as_plain
from support.ranks.programs import OFFLOADED, ONE_F_ONE_B
from support.ranks.worker import Ranks

from optpipe.errors import ScheduleError
from optpipe.model.ops import COMPUTE, Kind
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, certify
from optpipe_runtime import Layout
from optpipe_runtime.features.evictions import require_peers

PEERS = [(None, None), (1, None), (1, 0)]
WHERE = [((0, 0), (None, None)), *product([(0, 1), (0, 1, 1, 0), (1, 0, 1)], PEERS)]


@settings(max_examples=examples(80))
@given(st.data(), st.sampled_from(WHERE))
def test_any_valid_schedule_gives_the_same_sums_in_the_bytes_that_are_certified(
    ranks: Ranks, data: Any, where: tuple[tuple[int, ...], tuple[int | None, ...]]
) -> None:
    """On the problem that is measured, with evictions where a rank has a peer."""
    schedule = data.draw(schedules(measured(ranks, *where)))
    certified = certify(schedule.problem, schedule).device
    for rank, (report,) in enumerate(train_as_plain(ranks, [schedule], exact=False)):
        assert report.excess is None
        assert all(0 <= time.held_bytes <= time.certified_bytes for time in report.trace)
        if report.trace:
            assert max(time.held_bytes for time in report.trace) == report.peak_activation_bytes
            assert report.trace[-1].held_bytes == 0
            assert 0.3 * certified[rank].bytes < report.peak_activation_bytes <= certified[rank].bytes


def test_tied_embeddings_get_the_sum_of_both_gradients(ranks: Ranks) -> None:
    schedule = Schedule.parse(cases.problem([0, 1], 4), ONE_F_ONE_B)
    (first, whole), (last, _) = ranks(cases.tied, placement=[0, 1], schedule=schedule)
    for step in range(2):
        np.testing.assert_array_equal(first[step]["tied"], last[step]["tied"])
    np.testing.assert_allclose(first[1]["tied"], whole["tied"], rtol=1e-4, atol=1e-7)


def test_the_trace_has_every_op_in_order(ranks: Ranks) -> None:
    for rank, (report,) in enumerate(same(ranks, [0, 1], [OFFLOADED])):
        assert [str(time.op) for time in report.trace] == OFFLOADED[rank]
        ended = {str(time.op): time.end_ms for time in report.trace}
        assert all(0 <= time.start_ms <= time.end_ms <= report.step_ms for time in report.trace)
        assert ended[f"{rank}O0"] <= ended[f"{rank}D0"] <= ended[f"{rank}R0"]
        compute = [time for time in report.trace if time.op.kind in COMPUTE]
        assert all(a.end_ms <= b.start_ms for a, b in pairwise(compute))


def test_an_output_that_no_later_stage_uses_gets_no_gradient(ranks: Ranks) -> None:
    """None as in a plain run, not zeros, which an optimizer with momentum or weight decay would take for a gradient."""
    placement = [0, 1, 0]
    programs = [
        ["0F0", "0F1", "2F0", "2BW0", "2F1", "0B0", "2B1", "0W0", "2W1", "0BW1"],
        ["1F0", "1F1", "1B0", "1W0", "1BW1"],
    ]
    results = ranks(
        cases.with_branches, placement=placement, schedule=Schedule.parse(cases.problem(placement, 2), programs)
    )
    modules = cases.branches()
    for _ in range(2):
        x: Any = (torch.ones(2, cases.WIDTH),)
        for module in modules:
            x = module(*x)
        torch.autograd.backward(cases.first_of(x, torch.zeros(2, cases.WIDTH)) / 2)
    plain = cases.numbers(dict(enumerate(modules)))
    assert plain.keys() == {f"{s}.layers.0.{name}" for s in range(3) for name in ("weight", "bias")}
    require_close(joined(gradients for _, gradients in results), plain, rtol=1e-5, atol=1e-9)


# rank 0 has two activations at most, two wait on rank 1, whose rooms are made in another order than they are used
BPIPE = [
    ["0F0", "0E0", "0F1", "0D0", "0E1", "0F2", "0D1", "0L0", "0B0", "0W0", "0L1", "0BW1", "0F3", "0BW2", "0BW3"],
    ["0A1", "0A0", "1F0", "1BW0", "1F1", "1B1", "0V0", "1W1", "0V1", "1F2", "1BW2", "1F3", "1BW3"],
]


def test_same_bits_as_plain_autograd(ranks: Ranks) -> None:
    same(ranks, [0, 1], [BPIPE], peers=[1, None])


def test_evicted_bytes_are_on_the_peer(ranks: Ranks) -> None:
    """Without eviction rank 0 has three activations at once; with it two, the others beside the peer's own."""
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
