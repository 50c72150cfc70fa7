"""ZB-V, V-Half and V-Min: their formulas in the paper's unit model. V-Auto: never behind them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems.units import ACTIVATION, units

from optpipe import InputError, Schedule, certify, check
from optpipe_solver.systems import generate
from optpipe_solver.systems.block import repeat
from optpipe_solver.systems.v_shape import v_block

NAMES = ("zb-v", "v-half", "v-min")
PS = [*range(1, 9), 11, 16]


def chunks(name, p):
    """The peak of a device, in chunks."""
    return {"zb-v": 2 * p, "v-half": 2 * (p // 2 + 1), "v-min": 2 * ((p + 4) // 3)}[name]


def bubble(name, p):
    """Of the span."""
    if name == "zb-v" or p == 1:
        return 0
    return max(1, 3 * p - (4 if p % 2 else 7)) if name == "v-half" else 4 * p - (7, 5, 6)[p % 3]


def peaks(problem, schedule):
    return [peak.bytes / ACTIVATION for peak in certify(problem, schedule).device]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", PS)
def test_v_schedules_have_their_bubbles_and_peaks(name, p):
    for m in sorted({2 * p - 1, 2 * p, 3 * p + 1} if name == "zb-v" else {max(p, 4), p + 4, 2 * p + 1}):
        problem = units(p, m, v=2, shape="v")
        schedule = generate(name, problem)
        assert check(problem, schedule) == []
        assert schedule.span_ms == 6 * m + bubble(name, p)
        assert schedule.makespan_ms == 6 * m + max(p - 1, bubble(name, p))
        assert max(peaks(problem, schedule)) == chunks(name, p)
        if p != 2:  # the fullest moment is one in which no W waits
            light = problem.replace(
                stages=[stage.model_copy(update={"saved_for_weight_bytes": 0}) for stage in problem.stages]
            )
            assert max(peaks(light, Schedule(light, schedule.programs))) == chunks(name, p)


@pytest.mark.parametrize("p", [2, 5, 8])
def test_zb_v_holds_alike_on_every_device(p):
    problem = units(p, 2 * p, v=2, shape="v")
    assert peaks(problem, generate("zb-v", problem)) == [2 * p] * p


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
        block = v_block(problem, [there] * (p - 1), [back] * (p - 1), turns(p))
        repeat(problem, block, range(0, 6 * (p + 5), 6))  # refuses a collision


def limited(p, m, memory):
    """Memory for so many chunks."""
    problem = units(p, m, v=2, shape="v")
    devices = [device.model_copy(update={"activation_budget_bytes": memory * ACTIVATION}) for device in problem.devices]
    return problem.replace(devices=devices)


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
    rooms = [{"activation_budget_bytes": room * ACTIVATION} for room in rooms]
    problem = problem.replace(
        devices=[device.model_copy(update=room) for device, room in zip(problem.devices, rooms, strict=True)],
        stages=[
            stage.model_copy(update={"saved_for_weight_bytes": data.draw(st.integers(0, ACTIVATION))})
            for stage in problem.stages
        ],
    )
    schedule = generate("v-auto", problem)
    assert not check(problem, schedule) or schedule.programs == generate("v-min", problem).programs


def test_other_stages_are_refused_or_made():
    row = units(4, 8)
    for name in (*NAMES, "v-auto"):
        with pytest.raises(
            InputError, match=rf"^{name} needs 2 V-shaped stages a device: the problem has other stages"
        ):
            generate(name, row)
        schedule = generate(name, row, placements="all")
        assert str(schedule.placement) == "2 chunks a device, V-shaped"
        assert check(schedule.problem, schedule) == []
