"""The profiled problem predicts the memory that a schedule really takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems.strategies import schedules
from support.ranks import cases, profile
from support.ranks.calls import measured
from support.ranks.worker import Ranks

from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, certify

M = 3


@pytest.mark.parametrize("parts", [1, 3])
def test_measured_bytes_are_the_certified_ones(ranks: Ranks, parts: int) -> None:
    results = ranks(cases.profiled, placement=[0, 1], microbatches=M, offload_parts=parts)
    assert results[0][0] == results[1][0], "every rank has the same problem"
    problem = Problem.from_json(results[0][0])
    assert problem.p2p_ms > 0
    for rank, (_, (away, again, here), gradients) in enumerate(results):
        assert all(np.all(gradient == 1) for gradient in gradients.values()), "as before the profile"
        stage = problem.stages[rank]
        assert min(stage.forward_ms, stage.backward_input_ms, stage.backward_weight_ms) > 0
        assert min(stage.offload_ms or 0, stage.reload_ms or 0, stage.recompute_ms or 0) > 0
        assert stage.offload_parts == parts
        assert 0 < stage.saved_for_weight_bytes <= stage.activation_bytes
        assert 0.5 * stage.activation_bytes < (stage.offload_bytes or 0) <= stage.activation_bytes
        for report, split, recompute in ((away, parts, False), (again, 0, True), (here, 0, False)):
            schedule = Schedule.parse(problem, [cases.one_at_a_time(s, M, split, recompute) for s in range(2)])
            certificate = certify(problem, schedule)
            assert report.peak_activation_bytes <= certificate.device[rank].bytes
            assert report.host_peak_bytes >= certificate.host[rank].bytes
        assert here.peak_activation_bytes == M * stage.activation_bytes
        assert stage.checkpoint_bytes == (0 if rank == 0 else 2 * cases.LENGTH * cases.WIDTH * 4), (
            "what came from the stage before"
        )
        assert again.peak_activation_bytes == (M - 1) * stage.checkpoint_bytes + stage.activation_bytes
        assert away.peak_activation_bytes < 0.6 * here.peak_activation_bytes
        assert here.host_peak_bytes == 0


@pytest.mark.parametrize("host_memory_bytes", [0, 10**4])
def test_a_host_too_small_for_an_activation_offloads_nothing(ranks: Ranks, host_memory_bytes: int) -> None:
    problem, _ = ranks(
        cases.measure, placement=[0, 1], microbatches=M, offload_parts=2, host_memory_bytes=host_memory_bytes
    )
    assert [device.host_memory_bytes for device in problem.devices] == [host_memory_bytes] * 2
    assert not any(stage.can_offload for stage in problem.stages)
    assert all(stage.activation_bytes > 0 for stage in problem.stages)


@settings(max_examples=examples(15))
@given(st.data(), st.sampled_from([(0, 1), (0, 1, 1, 0)]), st.sampled_from([(None, None), (1, None), (1, 0)]))
def test_no_schedule_holds_more_than_certified(
    ranks: Ranks, data: Any, placement: tuple[int, ...], peers: tuple[int | None, ...]
) -> None:
    problem = measured(ranks, placement, peers)
    schedule = data.draw(schedules(problem))
    certificate = certify(problem, schedule)
    for rank, ((report,), _) in enumerate(ranks(cases.train, placement=placement, schedules=[schedule])):
        assert 0.3 * certificate.device[rank].bytes < report.peak_activation_bytes <= certificate.device[rank].bytes


# Measured while the others are at it


def inside(spans: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """The share of the time of these spans that lies between the first and the last of the others."""
    first, last = others[0][0], others[-1][1]
    return sum(max(0.0, min(b, last) - max(a, first)) for a, b in spans) / sum(b - a for a, b in spans)


def test_a_rank_with_fast_copies_measures_until_the_slow_one_has_finished(ranks: Ranks) -> None:
    (measured, quick, _), (_, slow, _) = ranks(profile.copies, placement=[0, 1], copy_s=[0.02, 0.2])
    here, there = measured.stages[0]["offload_ms"], measured.stages[1]["offload_ms"]
    assert here.count > 2 * there.count >= 6
    assert 20 <= here.ms < there.ms >= 200
    measuring = slow[-2 * there.count :]  # there and back, without the warm-up
    assert inside(measuring, quick) > 0.5


def test_full_duplex_is_measured_in_both_directions_at_once(ranks: Ranks) -> None:
    results = ranks(profile.copies, placement=[0, 1], copy_s=[0.3, 0.3], full_duplex=True)
    for found, out, back in results:
        assert found.problem.transfer_mode == "full_duplex"
        beside = [any(a < d and c < b for c, d in out) for a, b in back]
        assert sum(beside) >= len(back) - 1, "but for the last, which brings home what is still away"
        for times in found.stages:
            assert times["offload_ms"].ms >= 300
            assert times["reload_ms"].ms >= 300


def test_ranks_that_share_a_link_measure_one_after_the_other(ranks: Ranks) -> None:
    (measured, first, _), (_, second, _) = ranks(
        profile.copies, placement=[0, 1], copy_s=[0.005, 0.005], links=["a", "a"]
    )
    assert first[-1][1] <= second[0][0]
    assert all(times["offload_ms"].count >= 3 for times in measured.stages)


def test_the_loss_is_part_of_the_last_stage_of_each_route(ranks: Ranks) -> None:
    measured, _ = ranks(profile.two_routes, loss_s=0.1)
    first, both, last = (stage.forward_ms for stage in measured.problem.stages)
    assert last >= 100
    assert 25 <= both < 0.7 * last, "one of four micro-batches ends there"
    assert first < 0.5 * last


def test_a_batch_that_stages_change_in_place_is_cloned_for_the_profile(ranks: Ranks) -> None:
    assert ranks(profile.changing_the_batch) == [True, True]
