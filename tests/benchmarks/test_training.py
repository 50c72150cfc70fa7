"""Trainings on ranks: the paper's protocol in seconds, steps in a row, swaps, and what the executor costs the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.ranks.scripts import torchrun_on
from support.ranks.worker import Ranks

from benchmarks.training import in_a_row, own_steps, protocol, swap
from benchmarks.training.overhead import TORCHS_ON_ONE_RANK, beside, lowering, overhead
from benchmarks.training.protocol_ranks import FIRST, ProtocolSettings
from optpipe_cli import launch
from optpipe_runtime.demo.gpt import Size
from optpipe_runtime.demo.train import DemoSettings
from optpipe_runtime.fidelity.paced import Times

SMALL = DemoSettings(
    microbatches=2,  # without offload, so that the search ends with a proof, after a second of computing
    budget=2.4,
    rounds=1,
    turn=1,
    size=Size(width=64, heads=2, blocks=4, context=64, sequences=2),
)


@pytest.mark.parametrize("torchrun", [pytest.param("real", marks=pytest.mark.soak), "on ranks"])
def test_the_protocol_runs_with_a_backend_that_is_named(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, torchrun: str
) -> None:
    pytest.importorskip("pulp")
    if torchrun == "on ranks":
        monkeypatch.setattr(launch, "torchrun", torchrun_on(ranks))
    told = protocol.run(ProtocolSettings(milp_s=100.0, solver="pulp:cbc", training=SMALL))
    assert told["first"]["method"] == FIRST
    assert told["steps_beside"] > 0
    predicted = [told["first"]["predicted_ms"], *(offered["predicted_ms"] for offered in told["offered"])]
    assert predicted == sorted(set(predicted), reverse=True)
    assert sum(told["swaps"].values()) == len(told["offered"])
    assert told["best"]["predicted_ms"] <= min(predicted)
    assert [note for note in told["notes"] if note.startswith("milp: PuLP's PULP_CBC_CMD: ")]


def test_steps_in_a_row_are_compared_with_spans(ranks: Ranks) -> None:
    times, m, steps = Times(1.0, 1.0, 1.0, 0.0), in_a_row.MICROBATCHES, 2
    row, other = ranks(in_a_row.in_a_row, times=times, steps=steps)
    assert row == other
    assert row.spans_ms == pytest.approx(2 * row.span_ms + row.makespan_ms - row.span_ms)
    assert row.post_validated_ms >= steps * m * sum(times[:4]) + times.forward, "who sleeps is never early"
    assert row.clipped_ms >= steps * (m * sum(times[:4]) + times.forward)


@pytest.mark.soak
def test_steps_in_a_row_take_a_span_each(four_ranks: Ranks) -> None:
    """And those that wait for each other a makespan. On a busy machine everything takes longer, so this is a soak; that
    no rank waits, test_post_validation shows without a clock."""
    rows = [four_ranks(in_a_row.in_a_row, times=Times(20.0, 20.0, 20.0, 0.0), steps=10)[0] for _ in range(3)]
    assert any(row.deviation < 0.08 and row.post_validated_ms < row.clipped_ms for row in rows), rows


def test_what_a_swap_costs_is_measured(ranks: Ranks) -> None:
    first, second = ranks(swap.run, swaps=3)
    assert first == second
    assert first.swaps == 3
    assert 0 < first.outside_ms < first.step_ms
    assert 0 < first.swapped_outside_ms < first.swapped_ms


def test_a_schedule_for_every_step_is_measured_against_loaded_ones(ranks: Ranks) -> None:
    task = replace(own_steps.TASK, microbatches=2, documents=1, paced_ms=Times(2.0, 2.0, 2.0, 0.0))
    first, second = ranks(own_steps.own_steps, task=task, rounds=1)
    assert first == second
    assert first.steps == own_steps.STEPS * own_steps.BATCHES
    assert task.paced_ms is not None
    each = [
        task.paced_ms.of_documents(lengths) for _, _, named in own_steps.batches(task) for lengths in named["lengths"]
    ]
    work_ms = sum(sum(times[:3]) for times in each) / own_steps.BATCHES
    assert min(first.planned_ms, first.loaded_ms) >= work_ms, "who sleeps is never early"


def test_an_op_is_measured_against_a_plain_run() -> None:
    measured = overhead(stages=2, microbatches=3, steps=3)
    assert measured.ops == 2 * 3 * 3
    assert set(measured.by_kind_us) == set("FBWCODR")
    assert min(*measured.by_kind_us.values(), measured.step_ms, measured.plain_ms, measured.between_us) > 0
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
