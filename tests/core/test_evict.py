"""Evictions to a peer device: their times, their memory on both devices, and the mistakes that `check` reports."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import pipeline, stage
from support.problems.strategies import stages

from optpipe import (
    DeadlockError,
    Device,
    InputError,
    Kind,
    Op,
    Problem,
    Schedule,
    ScheduleError,
    check,
    simulate,
)
from optpipe.model.placement import rechunk, together

TIMES = (2, 2, 1)
PLAIN = stage(TIMES)
EVICTING = stage(TIMES, evict=(1, 3, 8))


def pair(m: int = 2, memory: int = 100, first: dict[str, Any] = EVICTING) -> Problem:
    """Two stages on two devices; the first evicts to the second."""
    problem = pipeline(2, m, memory, PLAIN)
    devices = [problem.devices[0].model_copy(update={"peer": 1}), problem.devices[1]]
    return problem.replace(devices=devices, stages=[{"device": 0, **first}, problem.stages[1]])


FIRST = "0F0 0E0 0D0 0F1 0L0 0BW0 0BW1"
SECOND = "0A0 1F0 1BW0 1F1 0V0 1BW1"


def parse(problem: Problem, first: str = FIRST, second: str = SECOND) -> Schedule:
    return Schedule.parse(problem, [first.split(), second.split()])


def test_a_deadlock_over_an_accept_is_shown():
    stuck = parse(pair(), second="1F0 1BW0 1F1 1BW1 0A0 0V0")
    with pytest.raises(DeadlockError, match="0A0") as caught:
        simulate(pair(), stuck)
    assert Op(Kind.E, 0, 0) in caught.value.cycle
    assert len(check(pair(), stuck)) == 1


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (FIRST.replace("0D0 ", ""), SECOND, "0E0 has no 0D0: its device copy is never let go"),
        (FIRST.replace("0L0 ", ""), SECOND, "0E0 has no 0L0: the backward misses its bytes"),
        (FIRST, SECOND.replace("0A0 ", ""), "0E0 has no 0A0: nothing makes room for it on the peer"),
        (FIRST, SECOND.replace("0V0 ", ""), "0A0 has no 0V0: its room is never let go"),
        (FIRST.replace("0E0 0D0 ", "").replace("0L0 ", ""), SECOND, "0A0 has no 0E0: nothing is evicted"),
        (FIRST.replace("0E0 0D0 ", "").replace("0L0 ", ""), SECOND, "0V0 has no 0E0: nothing is evicted"),
        (FIRST.replace("0E0 ", ""), SECOND, "0L0 has no 0E0: nothing is evicted"),
        (FIRST.replace("0E0 ", ""), SECOND, "0D0 has no 0O0 or 0E0: nothing has left"),
        (FIRST.replace("0E0", "0E0 0E0"), SECOND, "0E0 stands 2 times"),
        (FIRST.replace("0L0 0BW0", "0BW0 0L0"), SECOND, "0L0 stands after 0BW0"),
        (FIRST.replace("0E0 0D0", "0D0 0E0"), SECOND, "0E0 stands after 0D0"),
        (FIRST.replace("0D0 0F1 0L0", "0L0 0F1 0D0"), SECOND, "0D0 stands after 0L0"),
        (FIRST.replace("0F0 0E0", "0E0 0F0"), SECOND, "0F0 stands after 0E0"),
        (FIRST, "0V0 1F0 1BW0 1F1 1BW1 0A0", "0A0 stands after 0V0"),
        (
            FIRST.replace("0F1 0L0", "0C0 0F1 0L0"),
            SECOND,
            "0E0: an activation is offloaded, evicted or recomputed, one of them",
        ),
        (
            FIRST.replace("0F1", "0O0 0R0 0F1"),
            SECOND,
            "0E0: an activation is offloaded, evicted or recomputed, one of them",
        ),
        (
            "0A0 " + FIRST,
            SECOND.replace("0A0 ", ""),
            "0A0 in the program of device 0: the stage's device has another peer",
        ),
        (FIRST, SECOND.replace("0A0", "0A0 0E1"), "0E1 in the program of device 1: the stage is on another device"),
        (FIRST.replace("0F1", "0F1 1A0"), SECOND, "1A0 in the program of device 0: the stage has no evict_ms"),
    ],
)
def test_each_mistake_is_reported(first, second, message):
    problem = pair(first=stage(TIMES, evict=(1, 3, 8), offload=(1, 1, 8), recompute=(1, 1)))
    assert message in check(problem, parse(problem, first, second))


def test_simulate_refuses_what_it_cannot_time():
    for first, second, message in (
        (FIRST, SECOND.replace("0A0 ", ""), "0E0 in the program of device 0 has no room on the peer"),
        (FIRST.replace("0L0 ", ""), SECOND, "0V0 in the program of device 1 has no load"),
    ):
        with pytest.raises(ScheduleError, match=message):
            simulate(pair(), parse(pair(), first, second))


def test_a_device_that_only_accepts_has_no_span():
    problem = pair(m=1)
    problem = problem.replace(stages=problem.stages[:1])
    schedule = parse(problem, "0F0 0E0 0D0 0L0 0BW0", "0A0 0V0")
    assert check(problem, schedule) == []
    assert schedule.span_ms == schedule.makespan_ms == 2 + 1 + 3 + 3
    assert len(schedule.timeline.busy_ms()) == 1


@settings(deadline=None)
@given(st.lists(stages(0, evicting=True), min_size=1, max_size=4), st.integers(1, 4))
def test_the_pieces_of_a_stage_hold_and_keep_no_less_than_the_whole(costs, shares):
    piece = together(costs, shares)
    able = [stage for stage in costs if stage.can_evict]
    assert ("evict_ms" in piece) == bool(able)
    if able:
        assert shares * piece["evict_bytes"] >= sum(stage.evict_bytes for stage in able)
        stays = sum(stage.activation_bytes for stage in costs) - sum(stage.evict_bytes for stage in able)
        assert shares * (piece["activation_bytes"] - piece["evict_bytes"]) >= stays
        assert piece["evict_ms"] * shares == pytest.approx(sum(stage.evict_ms for stage in able))


def test_a_stage_evicts_only_where_its_device_has_a_peer():
    both_ways = rechunk(pair(), 1, "bidirectional")
    assert [stage.can_evict for stage in both_ways.stages] == [True, False, False, False]
    chunks = rechunk(pair(), 2)
    assert [stage.evict_bytes for stage in chunks.stages] == [4, None, 4, None]
    with pytest.raises(InputError, match=r"stages\[0\]\.evict_ms = 1\.0: its device 0 needs a peer"):
        pair().replace(devices=[Device(activation_budget_bytes=9)] * 2)
