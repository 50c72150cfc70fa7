"""The certificate: by hand, and against an independent clock under any jitter."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.oracles import clock
from support.problems import pipeline, stage
from support.problems.strategies import problems_with_schedules

from optpipe import Problem, Schedule, certify, check


@given(problems_with_schedules(beyond=True), st.randoms(use_true_random=True))
@settings(max_examples=examples(150))
def test_no_jitter_leads_to_more_bytes_than_certified(pair, random):
    """150 schedules, each run 20 times with random durations of every op and delays of every message."""
    problem, schedule = pair
    certificate = certify(problem, schedule)
    for _ in range(20):
        seen = clock.run(
            problem, schedule, lambda op: random.choice([0.0, random.uniform(0, 20)]), lambda op: random.uniform(0, 30)
        )
        for d in range(len(problem.devices)):
            assert seen.peak(seen.device_events[d]) <= certificate.device[d].bytes
            assert seen.peak(seen.host_events[d]) <= certificate.host[d].bytes


@given(problems_with_schedules(beyond=True))
def test_the_peak_is_exact(pair):
    """With equal durations and no delays the clock reaches the device peaks that the prefix scan finds."""
    problem, schedule = pair
    seen = clock.run(problem, schedule, lambda op: 1.0, lambda op: 0.0)
    certificate = certify(problem, schedule)
    for d in range(len(problem.devices)):
        assert seen.peak(seen.device_events[d]) == certificate.device[d].bytes


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
def test_bytes_op_by_op_are_those_of_the_certificate(pair):
    """What is held during an op peaks where the certificate does; nothing is held at the end."""
    problem, schedule = pair
    rows, held = schedule.compiled.rows, schedule.compiled.held
    for d, peak in enumerate(certify(problem, schedule).device):
        during, after = held.during[rows.device == d], held.after[rows.device == d]
        assert max(during, default=0) == peak.bytes
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
