"""ZB-H1, ZB-H2, ZB-V, V-Half and V-Min: their formulas in the papers' unit model. V-Auto: never behind them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems import with_budgets
from support.problems.units import ACTIVATION, peaks, units

from optpipe import Schedule, check
from optpipe_solver.systems import generate
from optpipe_solver.systems.block import repeat, with_weights
from optpipe_solver.systems.zero_bubble import v_path

GRADIENT = 300  # bytes that a weight gradient still needs
NAMES = ("zb-v", "v-half", "v-min")
PS = [*range(1, 9), 11, 16]


def bubbles(name, p, times):
    """Of makespan and span."""
    f, b, w = times
    if name == "zb-h1":
        return (p - 1) * max(f, b, f + b - w), (p - 1) * max(b, f + b - w)
    return (p - 1) * max(f, f + b - 2 * w, b - f), (p - 1) * max(0, f + b - 2 * w, b - f)


@pytest.mark.parametrize(("name", "k"), [("zb-h1", 1), ("zb-h2", 2)])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8, 13])
def test_zb_h1_and_zb_h2_have_the_published_bubble_and_memory(name, k, p):
    """At F = B = W: (p-1)(F + B - W) and (p-1)(F + B - 2W) = 0, in the span; M and 2M."""
    full = k * (p - 1) + 1
    for m in (full, full + 1, 3 * p):
        problem = units(p, m)
        schedule = generate(name, problem)
        assert check(problem, schedule) == []
        assert schedule.span_ms == 3 * m + (p - 1) * (2 - k)
        assert schedule.makespan_ms == 3 * m + p - 1
        assert peaks(schedule) == [full] * p


@pytest.mark.parametrize(("name", "k"), [("zb-h1", 1), ("zb-h2", 2)])
@given(p=st.integers(1, 7), more=st.integers(0, 5), times=st.tuples(*[st.integers(1, 9)] * 3))
@settings(max_examples=examples(60), deadline=None)
def test_zb_h1_and_zb_h2_for_other_times(name, k, p, more, times):
    m = k * (p - 1) + 1 + more
    problem = units(p, m, times=times, held=GRADIENT)
    schedule = generate(name, problem)
    makespan, span = bubbles(name, p, times)
    assert schedule.makespan_ms == m * sum(times) + makespan
    assert schedule.span_ms == m * sum(times) + span
    before_b = [k * (p - s - 1) + 1 for s in range(p)]
    assert peaks(schedule) == [count + k * s * GRADIENT / ACTIVATION for s, count in enumerate(before_b)]


def chunks(name, p):
    """The peak of a device, in chunks."""
    return {"zb-v": 2 * p, "v-half": 2 * (p // 2 + 1), "v-min": 2 * ((p + 4) // 3)}[name]


def bubble(name, p):
    """Of the span."""
    if name == "zb-v" or p == 1:
        return 0
    return max(1, 3 * p - (4 if p % 2 else 7)) if name == "v-half" else 4 * p - (7, 5, 6)[p % 3]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", PS)
def test_v_schedules_have_their_bubbles_and_peaks(name, p):
    for m in sorted({2 * p - 1, 2 * p, 3 * p + 1} if name == "zb-v" else {max(p, 4), p + 4, 2 * p + 1}):
        problem = units(p, m, v=2, shape="v")
        schedule = generate(name, problem)
        assert check(problem, schedule) == []
        assert schedule.span_ms == 6 * m + bubble(name, p)
        assert schedule.makespan_ms == 6 * m + max(p - 1, bubble(name, p))
        assert max(peaks(schedule)) == chunks(name, p)
        if p != 2:  # the fullest moment is one in which no W waits
            light = problem.replace(
                stages=[stage.model_copy(update={"saved_for_weight_bytes": 0}) for stage in problem.stages]
            )
            assert max(peaks(Schedule(light, schedule.programs))) == chunks(name, p)


@pytest.mark.parametrize("p", [2, 5, 8])
def test_zb_v_holds_alike_on_every_device(p):
    assert peaks(generate("zb-v", units(p, 2 * p, v=2, shape="v"))) == [2 * p] * p


@given(p=st.integers(2, 7), more=st.integers(0, 5), times=st.tuples(*[st.integers(1, 9)] * 3))
@settings(max_examples=examples(60), deadline=None)
def test_zb_v_for_other_times(p, more, times):
    m, (f, b, w) = 2 * p - 1 + more, times
    schedule = generate("zb-v", units(p, m, v=2, shape="v", times=times))
    assert schedule.span_ms == 2 * m * (f + b + w) + (p - 1) * max(
        w - f, abs(f - b), 2 * f - b - w, 2 * (f - w), 2 * (b - w)
    )


@given(name=st.sampled_from(["zb-v", "v-half"]), p=st.integers(2, 8), times=st.tuples(*[st.integers(1, 9)] * 3))
@settings(max_examples=examples(60), deadline=None)
def test_micro_batches_add_no_bubble(name, p, times):
    """Qi et al. 2024: with V-Half exactly where W + 2B >= 2F and W + 2F >= 2B; with ZB-V for any times."""
    f, b, w = times
    few, many = (generate(name, units(p, m, v=2, shape="v", times=times)).span_ms for m in (5 * p, 7 * p))
    none = name == "zb-v" or (w + 2 * b >= 2 * f and w + 2 * f >= 2 * b)
    assert (many - few == 2 * p * 2 * (f + b + w)) == none


@pytest.mark.parametrize(
    "step",
    [
        (3, 3, lambda p: (1, 1, 1)),
        (2, 1, lambda p: (1, 1 if p % 2 else 4, 2)),
        (1, 1, lambda p: (1, 1 if p % 3 else 3, 1)),
    ],
)
def test_blocks_repeat_without_collisions(step):
    there, back, turns = step
    for p in range(1, 20):
        problem = units(p, p + 5, v=2, shape="v")
        block = with_weights(problem, v_path([there] * (p - 1), [back] * (p - 1), turns(p)), 6)
        repeat(problem, block, range(0, 6 * (p + 5), 6))  # refuses a collision


def limited(p, m, memory):
    """Memory for so many chunks."""
    return with_budgets(units(p, m, v=2, shape="v"), memory * ACTIVATION)


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_v_auto_fits_and_is_never_longer_than_what_has_a_name(p):
    for m in (p, 2 * p + 1):
        for memory in range(chunks("v-min", p), 2 * p + 2):
            problem = limited(p, m, memory)
            schedule = generate("v-auto", problem)
            assert check(problem, schedule) == []
            named = [generate(name, problem) for name in NAMES]
            assert schedule.makespan_ms <= min(each.makespan_ms for each in named if not check(problem, each))


def test_v_auto_uses_memory_in_small_steps():
    """Between V-Half's ten chunks and ZB-V's sixteen each one more makes it shorter."""
    lengths = [generate("v-auto", limited(8, 24, memory)).makespan_ms for memory in range(10, 17)]
    assert lengths == sorted(set(lengths), reverse=True)


@given(data=st.data(), p=st.integers(2, 6), m=st.integers(1, 14))
@settings(max_examples=examples(40), deadline=None)
def test_v_auto_asks_what_each_device_has_room_for(data, p, m):
    """Uneven memory and stages: it fits, or no block was found and it is V-Min."""
    problem = units(p, m, v=2, shape="v")
    rooms = data.draw(st.lists(st.integers(1, 20), min_size=p, max_size=p))
    problem = with_budgets(problem, [room * ACTIVATION for room in rooms])
    problem = problem.replace(
        stages=[
            stage.model_copy(update={"saved_for_weight_bytes": data.draw(st.integers(0, ACTIVATION))})
            for stage in problem.stages
        ]
    )
    schedule = generate("v-auto", problem)
    assert not check(problem, schedule) or schedule.programs == generate("v-min", problem).programs
