"""k: of a problem's stages, and PipeOffload's estimate of it."""

from __future__ import annotations

import pytest

from optpipe import Device, Problem, Stage, estimated_offload_ratio, offload_ratio

A100 = {"flops": 220e12, "bytes_per_s": 15e9}


def stage(work_ms: float, **leave: float) -> Stage:
    fields = {"offload_bytes": 1000, **leave} if leave else {}
    return Stage(
        device=0,
        forward_ms=work_ms / 2,
        backward_input_ms=work_ms / 4,
        backward_weight_ms=work_ms / 4,
        activation_bytes=1000,
        saved_for_weight_bytes=0,
        **fields,
    )


def test_k_of_a_stage_is_the_round_trip_over_its_work():
    stages = [
        stage(28, offload_ms=12, reload_ms=16),
        stage(8, offload_ms=1, reload_ms=5),
        stage(8),
        stage(0, offload_ms=1, reload_ms=1),
    ]
    problem = Problem(microbatches=2, devices=[Device(activation_budget_bytes=10**6)], stages=stages)
    assert offload_ratio(problem) == [1.0, 0.75, None, float("inf")]
    assert offload_ratio(
        problem.replace(stages=[stage(4, offload_ms=0, reload_ms=0), stage(0, offload_ms=0, reload_ms=0)])
    ) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("hidden", "sequence", "k"),
    [
        (8192, 1024, 0.974),
        (4096, 16384, 1.194),
        (4096, 24313, 1.0),
    ],  # the second is why a sequence of 16k does not suffice everywhere
)
def test_the_papers_estimate(hidden, sequence, k):
    assert estimated_offload_ratio(hidden, sequence, **A100) == pytest.approx(k, abs=5e-4)


def test_the_estimate_is_bytes_over_the_link_against_floating_point_operations():
    b, s, h = 2, 4096, 5120
    bytes_both_ways, operations = (
        2 * 20 * b * s * h,
        3 * (24 * b * s * h**2 + 4 * b * s**2 * h),
    )  # backward is twice forward
    k = (bytes_both_ways / A100["bytes_per_s"]) / (operations / A100["flops"])
    assert estimated_offload_ratio(h, s, **A100) == pytest.approx(k)
