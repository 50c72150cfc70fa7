"""DualPipe and DualPipeV: the published bubble and activations in the unit model, and pairs of every sort of stages."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems.units import peaks, units

from optpipe import Kind, Pair, Schedule, check
from optpipe.model.placement import rechunk
from optpipe_solver.systems import generate

FACTORS = [1.0, 0.9, 0.75, 2 / 3]  # of F + B = 3: from both in turn down to the backward alone, 2


def both_ways(p: int, m: int, factor: float | None, times: Any = (1, 1, 1)) -> Schedule:
    problem = units(p, m, times=times).replace(overlap_factor=factor)
    return generate("dualpipe", rechunk(problem, 1, "bidirectional"))


def folded(n: int, m: int, factor: float | None, times: Any = (1, 1, 1)) -> Schedule:
    return generate("dualpipe-v", units(n, m, v=2, shape="v", times=times).replace(overlap_factor=factor))


def idle(schedule: Schedule) -> list[float]:
    return [schedule.makespan_ms - busy for busy in schedule.timeline.busy_ms()]


def published(p: int, pair: float) -> float:
    """(p/2-1)(F&B + B - 3W), B the whole backward, at F = 1, B = 2, W = 1."""
    return (p // 2 - 1) * (pair + 2 - 3)


@pytest.mark.parametrize("p", [2, 4, 8, 16])
@pytest.mark.parametrize("factor", FACTORS)
def test_the_bubble_and_the_activations_are_the_published_ones(p, factor):
    pair = 3 * factor
    for each_way in (p, p + 1, 2 * p, 5 * p // 2):
        m = 2 * each_way
        for schedule in (both_ways(p, m, factor), folded(p // 2, each_way, factor)):
            assert check(schedule.problem, schedule) == []
            innermost = (m - p - 1) * pair + (p + 1) * 3  # the phases add up to so many pairs and so much alone
            assert schedule.makespan_ms == pytest.approx(published(p, pair) + innermost)
            assert max(idle(schedule)) == pytest.approx(published(p, pair))
            assert peaks(schedule) == [p + 1] * len(schedule.programs)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 7), st.integers(0, 3), st.tuples(*[st.integers(1, 9)] * 3), st.floats(0, 1))
def test_for_other_times_the_bubble_is_the_one_that_is_derived(n, more, times, share):
    """The published one, in our terms (p/2-1)(F&B + B - 2W), where F = B >= W; F&B between the longer of the two and
    both in turn."""
    f, b, w = times
    together = f + b + w
    pair = max(f, b + w) + share * (together - max(f, b + w))
    schedule = folded(n, 2 * n + more, pair / together, times)
    bubble = (n - 1) * (pair + max(f, b) - w - min(b, w)) - min(f, (n - 1) * max(0, b - f))
    assert max(idle(schedule)) == pytest.approx(bubble, abs=1e-6)
    if f == b >= w:
        assert bubble == pytest.approx((n - 1) * (pair + b - 2 * w))


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_unpaired_the_bubble_is_half_of_it(p):
    for schedule in (both_ways(p, 2 * p, None), folded(p // 2, 2 * p, None)):
        assert not any(isinstance(item, Pair) for program in schedule.programs for item in program)
        assert idle(schedule) == [published(p, 3) / 2] * len(schedule.programs)
        assert peaks(schedule) == [p + 1] * len(schedule.programs)


@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 4), (4, 10), (8, 21)])
def test_the_v_is_half_of_the_two_ways(n, m):
    half, whole = folded(n, m, 0.8), both_ways(2 * n, 2 * m, 0.8)
    assert half.makespan_ms == pytest.approx(whole.makespan_ms)
    renamed = [
        [text_of(item, lambda s: s if s < n else 2 * n + s, lambda j: 2 * j) for item in program]
        for program in half.programs
    ]
    mine = [[text_of(item, lambda s: s, lambda j: j // 2 * 2) for item in program] for program in whole.programs[:n]]
    assert mine == renamed


def text_of(item: Any, stage: Any, microbatch: Any) -> list[tuple[Kind, int, int]]:
    return [
        (op.kind, stage(op.stage), microbatch(op.microbatch)) for op in (item if isinstance(item, Pair) else [item])
    ]


def test_the_outermost_device_of_the_figure():
    """8 ranks, 20 micro-batches: 6 F0; F0 F1; 3 times B W F of 1; 3 times both pairs; 3 times B1 and F1&B0; B1 B0; 3
    times W B0; W."""
    kinds = " ".join(str(item) for item in both_ways(8, 20, 1.0).programs[0])
    phases = [
        "0F0 0F2 0F4 0F6 0F8 0F10",
        "0F12 15F1",
        "15B1 15W1 15F3 15B3 15W3 15F5 15B5 15W5 15F7",
        "0F14+15BW7 15F9+0BW0 0F16+15BW9 15F11+0BW2 0F18+15BW11 15F13+0BW4",
        "15BW13 15F15+0BW6 15BW15 15F17+0BW8 15BW17 15F19+0BW10",
        "15BW19 0B12",
        "0W12 0B14 0W14 0B16 0W16 0B18",
        "0W18",
    ]
    assert kinds == " ".join(phases)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_fewer_micro_batches_than_stages_are_left_out(n):
    """Still shorter than 1F1B of the same work, and never longer than with one more."""
    lasts = [folded(n, m, None).makespan_ms for m in range(1, 2 * n + 1)]
    assert lasts == sorted(lasts)
    for m, ms in enumerate(lasts, 1):
        assert ms < generate("1f1b", units(n, m, times=(2, 2, 2))).makespan_ms
        schedule = both_ways(2 * n, 2 * m - 1, 1.0)
        assert check(schedule.problem, schedule) == []
