"""Evictions to a peer device: their times, their memory on both devices, and the mistakes that `check` reports."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import clock
from support.examples import examples
from support.problems import pipeline, stage
from support.strategies import problems_with_schedules, stages

from optpipe import (
    DeadlockError,
    Device,
    InputError,
    Kind,
    Op,
    Problem,
    Schedule,
    ScheduleError,
    ScheduleFile,
    certify,
    check,
    simulate,
)
from optpipe.evaluate.jitter import Noise
from optpipe.model.placement import rechunk, together
from optpipe.show.lanes import blocks, kinds_in
from optpipe.show.svg import gantt

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


def starts(schedule: Schedule) -> dict[str, float]:
    ops = [str(op) for program in schedule.programs for op in program.ops()]
    return dict(zip(ops, schedule.timeline.start.tolist(), strict=True))


def test_times_by_hand():
    schedule = parse(pair())
    assert check(pair(), schedule) == []
    at = starts(schedule)
    assert (at["0E0"], at["0D0"], at["0F1"]) == (2.0, 3.0, 3.0)  # the second forward waits for the eviction
    assert (at["0L0"], at["0BW0"], at["0BW1"]) == (5.0, 8.0, 12.0)  # issued after 0F1, back in three ms
    assert (at["1BW0"], at["1F1"], at["0V0"], at["1BW1"]) == (4.0, 7.0, 9.0, 9.0)
    assert schedule.makespan_ms == 15.0


def test_the_peer_takes_the_bytes_before_the_eviction_and_frees_them_after_the_load():
    late = starts(parse(pair(), second="1F0 0A0 1BW0 1F1 0V0 1BW1"))
    assert (late["0A0"], late["0E0"], late["0F1"]) == (4.0, 4.0, 5.0)
    at = starts(parse(pair(first=stage(TIMES, evict=(1, 30, 8)))))
    assert (at["0L0"], at["0V0"], at["1BW1"], at["0BW0"]) == (5.0, 35.0, 35.0, 35.0)


def test_memory_of_both_devices_by_hand():
    problem = pair()
    one, other = certify(problem, parse(problem)).device
    assert (one.bytes, one.at) == (20, "0L0")  # 2 stay of the first, 10 of the second, 8 come back
    assert (other.bytes, other.at) == (18, "1F0")  # 8 for the peer beside its own 10
    early = "0A0 1F0 1BW0 0V0 1F1 1BW1"  # compute waits for the load, the room is free sooner
    assert certify(problem, parse(problem, second=early)).device[1].at == "1F0"
    tight = pair(memory=17)
    assert check(tight, parse(tight, first="0F0 0E0 0D0 0F1 0BW1 0L0 0BW0", second="0A0 1F0 1F1 1BW1 1BW0 0V0")) == [
        "device 1 needs 28 B during 1F1 and has 17 B"
    ]


def test_evictions_have_a_link_of_their_own():
    """Offloads and evictions run at one time; those of one device and its loads run in program order."""
    problem = pair(3, first=stage(TIMES, evict=(1, 3, 8), offload=(5, 5, 8)))
    first = "0F0 0O0 0F1 0E1 0F2 0E2 0D0 0D1 0D2 0R0 0L1 0L2 0BW0 0BW1 0BW2"
    at = starts(parse(problem, first, "0A1 0A2 1F0 1BW0 1F1 1BW1 1F2 1BW2 0V1 0V2"))
    assert (at["0O0"], at["0E1"], at["0E2"]) == (2.0, 4.0, 6.0)
    assert (at["0R0"], at["0L1"], at["0L2"]) == (7.0, 7.0, 10.0)
    turned = parse(problem, first.replace("0E1 0F2 0E2", "0F2 0E2 0E1"), "0A1 0A2 1F0 1BW0 1F1 1BW1 1F2 1BW2 0V1 0V2")
    assert (starts(turned)["0E2"], starts(turned)["0E1"]) == (6.0, 7.0)


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
        (FIRST, SECOND.replace("0A0 ", ""), "0E0 has no 0A0 on the peer: nothing makes room for it there"),
        (FIRST, SECOND.replace("0V0 ", ""), "0A0 has no 0V0: its room is never let go"),
        (FIRST.replace("0E0 0D0 ", "").replace("0L0 ", ""), SECOND, "0A0 has no 0E0: nothing is evicted"),
        (FIRST.replace("0E0 0D0 ", "").replace("0L0 ", ""), SECOND, "0V0 has no 0E0: nothing is evicted"),
        (FIRST.replace("0E0 ", ""), SECOND, "0L0 has no 0E0: nothing is evicted"),
        (FIRST.replace("0E0 ", ""), SECOND, "0D0.0 has no offload or eviction before it"),
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
    assert Noise(problem, 0.0).percentile_ms(schedule.compiled, "span") == schedule.span_ms


@given(problems_with_schedules(beyond=True), st.randoms(use_true_random=True))
@settings(max_examples=examples(100), deadline=None)
def test_no_jitter_breaks_the_certificate_on_either_device(pair, random):
    problem, schedule = pair
    certificate = certify(problem, schedule)
    for _ in range(10):
        seen = clock.run(
            problem,
            schedule,
            lambda op: random.choice([0.0, random.expovariate(0.2)]),
            lambda op: random.uniform(0, 30),
        )
        for d in range(len(problem.devices)):
            assert seen.peak(seen.device_events[d]) <= certificate.device[d].bytes


def test_files_and_pictures_show_them():
    schedule = parse(pair())
    file = ScheduleFile.from_json(ScheduleFile.from_schedule(schedule).to_json())
    assert file.schedule() == schedule
    assert [op.kind for op in file.ops if op.kind in "EL"] == ["E", "L"]
    assert {Kind.E, Kind.L} <= set(kinds_in(schedule))
    assert [str(block.op) for block in blocks(schedule) if block.transfer] == ["0E0", "0L0"]
    assert "evict" in gantt(schedule)


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
