"""Trainings on ranks: steps in a row, swaps, and what the executor costs the host."""

import pytest
from support.ranks.worker import Ranks

from benchmarks.training import on_ranks
from benchmarks.training.overhead import TORCHS_ON_ONE_RANK, beside, lowering, overhead
from examples.paced import Times


def test_steps_in_a_row_are_compared_with_spans(ranks: Ranks) -> None:
    times, m, steps = Times(1.0, 1.0, 1.0, 0.0), on_ranks.MICROBATCHES, 2
    row, other = ranks(on_ranks.in_a_row, times=times, steps=steps)
    assert row == other
    assert row.spans_ms == pytest.approx(2 * row.span_ms + row.makespan_ms - row.span_ms)
    assert row.post_validated_ms >= steps * m * sum(times[:4]) + times.forward, "who sleeps is never early"
    assert row.clipped_ms >= steps * (m * sum(times[:4]) + times.forward)


@pytest.mark.soak
def test_steps_in_a_row_take_a_span_each(four_ranks: Ranks) -> None:
    """And those that wait for each other a makespan. On a busy machine everything takes longer, so this is a soak; that
    no rank waits, test_post_validation shows without a clock."""
    rows = [four_ranks(on_ranks.in_a_row, times=Times(20.0, 20.0, 20.0, 0.0), steps=10)[0] for _ in range(3)]
    assert any(row.deviation < 0.08 and row.post_validated_ms < row.clipped_ms for row in rows), rows


def test_what_a_swap_costs_is_measured(ranks: Ranks) -> None:
    first, second = ranks(on_ranks.swap_cost, swaps=3)
    assert first == second
    assert first.swaps == 3
    assert min(first.step_ms, first.prepared_ms, first.swapped_ms) > 0


def test_a_schedule_for_every_step_is_measured_against_loaded_ones(ranks: Ranks) -> None:
    times, size = Times(2.0, 2.0, 2.0, 0.0, saved=2), {"microbatches": 2, "together": 1}
    first, second = ranks(on_ranks.own_steps, times=times, rounds=1, **size)
    assert first == second
    assert first.steps == on_ranks.BATCH_STEPS * on_ranks.BATCHES
    each = [times.of_documents(lengths) for _, _, named in on_ranks.batches(**size) for lengths in named["lengths"]]
    work_ms = sum(sum(ms[:3]) for ms in each) / on_ranks.BATCHES
    assert min(first.planned_ms, first.loaded_ms, first.fixed_ms) >= work_ms, "who sleeps is never early"


def test_an_op_is_measured_against_a_plain_run() -> None:
    measured = overhead(stages=2, microbatches=3, steps=3)
    assert measured.ops == 2 * 3 * 3
    assert min(measured.step_ms, measured.plain_ms, measured.traced_ms) > 0
    assert measured.followed_ratio - 1 == pytest.approx((measured.traced_ratio - 1) * 3 / 16)


def test_a_step_is_measured_beside_torchs_pipelines() -> None:
    measured = beside(microbatches=2, steps=2)
    torchs = {"torch's Interleaved1F1B", "torch's InterleavedZeroBubble"} if TORCHS_ON_ONE_RANK else set()
    assert set(measured.ratios) == {"F BW", "F B W"} | torchs
    assert min(measured.plain_ms, *measured.ratios.values()) > 0


def test_lowering_is_measured() -> None:
    small, large = lowering(2, 4), lowering(4, 64)
    assert (small.ops, large.ops) == (24, 768)
    assert 0 < small.prepare_ms < large.prepare_ms
