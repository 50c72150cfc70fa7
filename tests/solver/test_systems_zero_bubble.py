"""ZB-H1, ZB-H2, ZB-V, V-Half and V-Min: their formulas in the papers' unit model. V-Auto: never behind them. Building
blocks."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems import with_budgets
from support.problems.units import ACTIVATION, peaks, units

from optpipe import Schedule, check
from optpipe_solver.systems import generate
from optpipe_solver.systems.block import Block, repeat, with_weights

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
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 7, 8, 13])
@example(more=0, times=(1, 1, 1), held=ACTIVATION)
@example(more=1, times=(1, 1, 1), held=ACTIVATION)
@example(more=13, times=(1, 1, 1), held=ACTIVATION)
@given(more=st.integers(0, 5), times=st.tuples(*[st.integers(1, 9)] * 3), held=st.sampled_from([ACTIVATION, GRADIENT]))
@settings(max_examples=examples(12), deadline=None)
def test_zb_h1_and_zb_h2_have_their_bubbles_and_memory(name, k, p, more, times, held):
    """Published for F = B = W: (p-1)(F + B - W) and (p-1)(F + B - 2W) = 0, in the span; M and 2M."""
    m = k * (p - 1) + 1 + more
    problem = units(p, m, times=times, held=held)
    schedule = generate(name, problem)
    assert check(problem, schedule) == []
    makespan, span = bubbles(name, p, times)
    assert schedule.makespan_ms == m * sum(times) + makespan
    assert schedule.span_ms == m * sum(times) + span
    before_b = [k * (p - s - 1) + 1 for s in range(p)]
    bytes_held = [count * ACTIVATION + k * s * held for s, count in enumerate(before_b)]
    assert peaks(schedule) == [size / ACTIVATION for size in bytes_held]


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
        assert name != "zb-v" or peaks(schedule) == [2 * p] * p
        if p != 2:  # the fullest moment is one in which no W waits
            light = problem.replace(
                stages=[stage.model_copy(update={"saved_for_weight_bytes": 0}) for stage in problem.stages]
            )
            assert max(peaks(Schedule(light, schedule.programs))) == chunks(name, p)


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


def one_f_one_b(p):
    """1F1B's block (Qi et al. 2024): F one slot, the fused backward two, a micro-batch every three."""
    return Block(forward=range(p), backward=[p + 2 * (p - 1 - s) for s in range(p)])


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("m", [1, 2, 7])
def test_the_block_of_1f1b_repeated_is_1f1b(p, m):
    problem = units(p, m)
    assert repeat(problem, one_f_one_b(p), range(0, 3 * m, 3)).programs == generate("1f1b", problem).programs


def test_ops_in_one_slot_wait():
    problem, block = units(3, 4), one_f_one_b(3)
    schedule = repeat(problem, block, range(0, 8, 2))
    assert check(problem, schedule) == []
    assert schedule.makespan_ms < repeat(problem, block, range(0, 40, 10)).makespan_ms


def test_a_block_repeated_holds_its_lifespan_over_the_interval():
    """Qi et al. 2024, section 2: the peak is the lifespan, from F to the end of W, over the interval, rounded up."""
    problem = units(3, 20)
    for late in range(0, 24, 4):
        block = with_weights(problem, Block(forward=(0, 1, 2), backward=(9 + late, 4 + late, 3 + late)), 4)
        lives = [weight + 1 - forward for forward, weight in zip(block.forward, block.weight, strict=True)]
        assert peaks(repeat(problem, block, range(0, 80, 4))) == [-(-life // 4) for life in lives]
