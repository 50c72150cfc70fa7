"""PipeOffload's Table 3: shares of a switch's link, and what follows for groups of copies."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.table3 import BOTH_WAYS, IN, OUT, TABLE, rates, throughputs

BY_NAME = {schedule.name: schedule for schedule in TABLE}
COPIES = tuple(product((0, 1), (IN, OUT)))


@given(st.sets(st.sampled_from(COPIES)))
def test_no_link_is_overfull_and_no_copy_could_be_faster_alone(copies: set[tuple[int, str]]) -> None:
    rate = rates(list(copies))
    for way in (IN, OUT):
        together = sum(rate[copy] for copy in copies if copy[1] == way)
        assert together <= 1 + 1e-12
        for gpu in (0, 1):
            if (gpu, way) in copies:  # held up by the switch, or by what the GPU itself can do
                most = BOTH_WAYS[way] if {(gpu, IN), (gpu, OUT)} <= copies else 1
                assert rate[gpu, way] == pytest.approx(most) or together == pytest.approx(1)


def test_without_delays_each_schedule_has_one_throughput() -> None:
    """Parallel copies halve the switch's link all the time; complementary ones never meet."""
    for name, expected in (
        ("parallel", 0.5),
        ("parallel, synchronized", 0.5),
        ("interleaved", 1.0),
        ("interleaved, synchronized", 1.0),
        ("dual stream", 2 * BOTH_WAYS[IN]),  # out ends a little sooner than in
    ):
        reached = throughputs(BY_NAME[name], np.zeros((2, 5)))
        assert reached == pytest.approx(expected, rel=0.02)


@given(st.integers(0, 100), st.floats(0.1, 20))
def test_only_synchronized_groups_keep_their_throughput_under_delays(seed: int, delay: float) -> None:
    delays = np.random.default_rng(seed).uniform(0, delay, (2, 20))
    reached = {name: throughputs(schedule, delays) for name, schedule in BY_NAME.items()}
    assert reached["interleaved, synchronized"] == pytest.approx(1)
    assert reached["parallel, synchronized"] == pytest.approx(0.5)
    for name in ("parallel", "interleaved"):
        assert reached[name].min() >= 0.5 - 1e-6
        assert reached[name].max() <= 1 + 1e-6
