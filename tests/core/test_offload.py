"""k, which says whether there is time to offload: of a problem's stages, and PipeOffload's estimate of it."""

from __future__ import annotations

import pytest
from support.problems import pipeline, stage
from support.problems.chain import chain

from optpipe import Kind, Schedule, estimated_offload_ratio, offload_ratio
from optpipe.lift import prune

A100 = {"flops": 220e12, "bytes_per_s": 15e9}


def test_k_of_a_stage_is_the_round_trip_over_its_work():
    stages = [
        stage((14, 7, 7), offload=(12, 16, 10)),
        stage((4, 2, 2), offload=(1, 5, 10)),
        stage((4, 2, 2)),
        stage((0, 0, 0), offload=(1, 1, 10)),
        stage((2, 1, 1), offload=(0, 0, 10)),
        stage((0, 0, 0), offload=(0, 0, 10)),
    ]
    assert offload_ratio(pipeline(6, 2, 100, stages)) == [1.0, 0.75, None, float("inf"), 0.0, 0.0]


@pytest.mark.parametrize(
    ("hidden", "sequence", "k"),
    [
        (8192, 1024, 0.974),
        (4096, 16384, 1.194),  # so a sequence of 16k does not suffice everywhere
        (4096, 24313, 1.0),
    ],
)
def test_the_papers_estimate(hidden, sequence, k):
    assert estimated_offload_ratio(hidden, sequence, **A100) == pytest.approx(k, abs=5e-4)


def test_an_offload_goes_where_memory_suffices_to_the_byte_without_it():
    problem = chain(memory=2)
    away = Schedule.parse(
        problem, [["0F0", "0O0", "0D0", "0F1", "0R0", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]]
    )
    assert prune(away).programs[0].texts() == ["0F0", "0F1", "0BW0", "0BW1"]
    less = problem.devices[0].model_copy(update={"activation_budget_bytes": 1999})
    tight = Schedule(problem.replace(devices=[less, problem.devices[1]]), away.programs)
    assert prune(tight).programs == away.programs


def test_a_part_stays_where_memory_suffices_for_it_alone():
    problem = pipeline(1, 2, 16, stage(offload=(1, 1, 8), offload_parts=2))
    away = Schedule.parse(problem, [["0F0", "0O0", "0O0.1", "0D0", "0D0.1", "0F1", "0BW1", "0R0", "0R0.1", "0BW0"]])
    moved = [op for op in prune(away).programs[0].ops() if op.kind in (Kind.O, Kind.D, Kind.R)]
    assert [op.kind for op in moved] == [Kind.O, Kind.D, Kind.R]
    assert len({op.part for op in moved}) == 1
