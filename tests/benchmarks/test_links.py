"""Six ways to co-schedule the copies of two GPUs: what runs beside what, by a clock in place of CUDA's streams."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from benchmarks.gpu.links import IN, OUT, TABLE, Step, histogram, plan, rates

BY_NAME = {schedule.name: schedule for schedule in TABLE}
COPY = 1.0  # ms


def times(steps: Sequence[Step], delays: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """When each step runs if no copy disturbs another one."""
    found: list[tuple[float, float]] = []
    free: dict[tuple[int, int], float] = {}
    for number, step in enumerate(steps):
        assert all(earlier < number for earlier in step.waits)  # else CUDA would not wait
        begin = max([free.get((step.gpu, step.lane), 0.0), *(found[earlier][1] for earlier in step.waits)])
        end = begin + (COPY if step.way else delays[step.gpu][step.group])
        free[step.gpu, step.lane] = end
        found.append((begin, end))
    return found


def beside(steps: Sequence[Step], when: Sequence[tuple[float, float]]) -> set[tuple[str, str]]:
    """The directions in which the first and the second GPU copy at one time."""
    copies = [(step, at) for step, at in zip(steps, when, strict=True) if step.way]
    return {
        (a.way, b.way)
        for a, (a_begins, a_ends) in copies
        for b, (b_begins, b_ends) in copies
        if a.gpu < b.gpu and max(a_begins, b_begins) < min(a_ends, b_ends) - 1e-9
    }


delays = st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=4)


@given(delays, st.integers(1, 3))
@settings(max_examples=examples(60))
def test_synchronized_copies_keep_their_partner_whatever_the_delays(waits, pairs):
    each = list(zip(*waits, strict=True))
    for name, together in (("parallel", {(IN, IN), (OUT, OUT)}), ("interleaved", {(IN, OUT), (OUT, IN)})):
        steps = plan(BY_NAME[f"{name}, synchronized"], len(waits), pairs)
        assert beside(steps, times(steps, each)) == together


def test_without_synchronization_a_delay_changes_the_partner():
    for name in ("parallel", "interleaved"):
        steps = plan(BY_NAME[name], 1, 2)
        alike, shifted = (beside(steps, times(steps, [[0.0], [late]])) for late in (0.0, COPY))
        assert alike
        assert shifted
        assert not alike & shifted


@pytest.mark.parametrize("schedule", TABLE, ids=lambda schedule: schedule.name)
def test_each_group_has_as_many_copies_each_way_and_waits_for_its_delay(schedule):
    groups, pairs, late = 3, 4, [[5.0, 0.5, 2.0], [1.0, 3.0, 0.0]]
    steps = plan(schedule, groups, pairs)
    when = times(steps, late)
    for gpu in (0, 1):
        for group in range(groups):
            own = [(step, at) for step, at in zip(steps, when, strict=True) if (step.gpu, step.group) == (gpu, group)]
            assert [step.way for step, _ in own].count(IN) == [step.way for step, _ in own].count(OUT) == pairs
            (delayed,) = (at for step, at in own if step.way is None)
            assert all(at[0] >= delayed[1] for step, at in own if step.way)
    found = rates(steps, when, 3 * 10**6)
    assert found.shape == (2, groups)
    both_ways = 2 if schedule.name.startswith("dual") else 1
    assert found == pytest.approx(np.full((2, groups), both_ways * 3.0))  # 3 MB in 1 ms, each way


def test_a_histogram_has_its_highest_bar_where_most_are():
    assert histogram(np.array([1.0, 9.5, 9.6, 9.7]), 10.0, bins=5) == "▃   █"


def test_without_two_gpus_it_says_so(bench):
    if torch.cuda.device_count() > 1:
        pytest.skip("there are two GPUs here")
    code, out, err = bench("links")
    assert (code, out) == (2, "")
    assert "--gpus = 0 1: torch" in err
    assert "two of them on one PCIe switch were expected" in err
