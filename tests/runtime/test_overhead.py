"""The cost of the runtime on the host is measured on real steps."""

from __future__ import annotations

import pytest

from optpipe_runtime.bench.overhead import TORCHS_ON_ONE_RANK, beside, lowering, overhead


def test_an_op_is_measured_against_a_plain_run() -> None:
    found = overhead(stages=2, microbatches=3, steps=3)
    assert found.ops == 2 * 3 * 3
    assert set(found.by_kind_us) == set("FBWCODR")
    assert all(us > 0 for us in found.by_kind_us.values())
    assert found.step_ms > 0
    assert found.plain_ms > 0
    assert found.between_us > 0
    assert found.traced_ratio == found.traced_ms / found.step_ms > 0
    assert found.followed_ratio - 1 == pytest.approx((found.traced_ratio - 1) * 3 / 16)


def test_a_step_is_measured_beside_torchs_pipelines() -> None:
    found = beside(microbatches=2, steps=2)
    assert found.plain_ms > 0
    torchs = {"torch's Interleaved1F1B", "torch's InterleavedZeroBubble"} if TORCHS_ON_ONE_RANK else set()
    assert set(found.ratios) == {"F BW", "F B W"} | torchs
    assert all(ratio > 0 for ratio in found.ratios.values())


def test_lowering_is_measured() -> None:
    small, large = lowering(2, 4), lowering(4, 64)
    assert (small.ops, large.ops) == (24, 768)
    assert 0 < small.prepare_ms < large.prepare_ms
