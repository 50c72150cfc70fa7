"""The one memory rule, and the certificate: by hand, and against an independent clock under any jitter."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.oracles import clock
from support.problems import pipeline, stage
from support.problems.strategies import problems_with_schedules

from optpipe import Kind, Problem, Schedule, certify, check
from optpipe.evaluate.effects import TABLE, Effects, Holding
from optpipe.show.lanes import memory_over_time


@given(problems_with_schedules(beyond=True), st.randoms(use_true_random=True))
@settings(max_examples=examples(150))
def test_no_jitter_leads_to_more_bytes_than_certified(pair, random):
    problem, schedule = pair
    certificate = certify(problem, schedule)
    for _ in range(20):
        seen = clock.run(
            problem, schedule, lambda op: random.choice([0.0, random.uniform(0, 20)]), lambda op: random.uniform(0, 30)
        )
        for d in range(len(problem.devices)):
            assert seen.peak(seen.device_events[d]) <= certificate.device[d].bytes
            assert seen.peak(seen.host_events[d]) <= certificate.host[d].bytes


def one_device(memory: int, host: int | None = None, **more: object) -> Problem:
    return pipeline(1, 2, memory, stage(**more), device={"host_memory_bytes": host})


OFFLOAD = {"offload": (1, 1, 8)}
RECOMPUTE = {"recompute": (1, 1)}


@pytest.mark.parametrize(
    ("more", "program", "peak", "at"),
    [
        ({}, "0F0 0BW0 0F1 0BW1", 10, "0F0"),
        ({}, "0F0 0F1 0BW0 0BW1", 20, "0F1"),
        ({}, "0F0 0B0 0F1 0B1 0W0 0W1", 14, "0F1"),
        ({"saved_for_weight_bytes": 13}, "0F0 0B0 0W0 0F1 0BW1", 13, "0B0"),
        (OFFLOAD, "0F0 0O0 0F1 0D0 0BW1 0R0 0BW0", 20, "0F1"),
        (OFFLOAD, "0F0 0O0 0D0 0F1 0BW1 0R0 0BW0", 12, "0F1"),
        (OFFLOAD, "0F0 0O0 0D0 0F1 0R0 0BW1 0BW0", 20, "0R0"),
        ({**OFFLOAD, "offload_parts": 3}, "0F0 0O0 0O0.1 0D0 0D0.1 0F1 0BW1 0R0 0R0.1 0BW0", 15, "0F1"),
        (RECOMPUTE, "0F0 0F1 0C0 0BW0 0BW1", 20, "0C0"),
        (RECOMPUTE, "0F0 0F1 0C0 0BW0 0C1 0BW1", 11, "0F1"),
    ],
)
def test_by_hand(more, program, peak, at):
    problem = one_device(peak, **more)
    schedule = Schedule.parse(problem, [program.split()])
    found = certify(problem, schedule).device[0]
    assert (found.bytes, found.at) == (peak, at)
    assert check(problem, schedule) == []
    tight = one_device(peak - 1, **more)
    assert check(tight, schedule) == [f"device 0 needs {peak} B during {at} and has {peak - 1} B"]


@given(problems_with_schedules(beyond=True))
def test_the_peak_is_exact(pair):
    """With equal durations and no delays the clock reaches the peak that the prefix scan finds; bytes op by op have it,
    too, and nothing is held at the end."""
    problem, schedule = pair
    seen = clock.run(problem, schedule, lambda op: 1.0, lambda op: 0.0)
    rows, held = schedule.compiled.rows, schedule.compiled.held
    for d, peak in enumerate(certify(problem, schedule).device):
        during, after = held.during[rows.device == d], held.after[rows.device == d]
        assert seen.peak(seen.device_events[d]) == max(during, default=0) == peak.bytes
        assert len(during) == len(after) == len(schedule.programs[d])
        assert (after <= during).all()
        assert len(after) == 0 or after[-1] == 0


@pytest.mark.parametrize(
    ("program", "during", "after"),
    [
        ("0F0 0F1 0B0 0W0 0BW1", [10, 20, 20, 14, 10], [10, 20, 14, 10, 0]),
        ("0F0 0O0 0D0 0F1 0BW1 0R0 0BW0", [10, 10, 10, 12, 12, 10, 10], [10, 10, 2, 12, 2, 10, 0]),
        ("0F0 0F1+0B0 0W0 0BW1", [10, 20, 20, 14, 10], [10, 20, 14, 10, 0]),
    ],
)
def test_op_by_op_by_hand(program, during, after):
    problem = one_device(100, **OFFLOAD).replace(overlap_factor=0.5)
    held = Schedule.parse(problem, [program.split()]).compiled.held
    assert (held.during.tolist(), held.after.tolist()) == (during, after)


def test_host_memory_is_held_until_the_backward():
    program = [["0F0", "0O0", "0D0", "0F1", "0O1", "0D1", "0R0", "0BW0", "0R1", "0BW1"]]
    enough, less = one_device(100, host=16, **OFFLOAD), one_device(100, host=15, **OFFLOAD)
    assert check(enough, Schedule.parse(enough, program)) == []
    assert check(less, Schedule.parse(less, program)) == ["device 0 needs 16 B of host memory during 0O1 and has 15 B"]


ONE = pipeline(1, 1, 100, stage(recompute=(1, 3), offload=(1, 1, 5), offload_parts=2))


def test_levels_say_what_an_activation_holds_op_by_op():
    effects = Effects(ONE)
    forward, fused = Holding(Kind.F, False, 10), Holding(Kind.BW, True, 0)
    split = [forward, Holding(Kind.B, True, 4), Holding(Kind.W, True, 0)]
    assert effects.holdings(0, 0, Kind.F, Kind.B, Kind.W) == split
    assert effects.holdings(0, 0, Kind.F, Kind.BW) == [forward, fused]
    again = [forward, Holding(Kind.F, True, 3), Holding(Kind.C, False, 10), fused]
    assert effects.holdings(0, 0, Kind.F, Kind.C, Kind.BW, level=0) == again


def test_a_changed_rule_changes_certificate_levels_and_picture(monkeypatch):
    """B also needs a workspace."""
    rule, workspace = TABLE[Kind.B], 7
    grown = replace(rule, takes=lambda x: rule.takes(x) + workspace, frees=lambda x: rule.frees(x) + workspace)
    monkeypatch.setitem(TABLE, Kind.B, grown)
    schedule = Schedule.parse(ONE, [["0F0", "0B0", "0W0"]])
    peak = certify(ONE, schedule).device[0]
    assert (peak.bytes, peak.at) == (10 + workspace, "0B0")
    assert max(size for _, size in memory_over_time(schedule, 0)) == 10 + workspace
    assert Holding(Kind.B, False, 10 + workspace) in Effects(ONE).holdings(0, 0, Kind.F, Kind.B, Kind.W)
