"""Times: by hand, and against an independent event clock. Memory has one rule; its certificate: by hand, and against
that clock under any jitter."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.oracles import clock
from support.problems import pipeline, stage
from support.problems.strategies import AMPLE, problems_with_schedules

from optpipe import DeadlockError, Kind, Op, Problem, Schedule, certify, check, simulate
from optpipe.evaluate import timeline as timeline_module
from optpipe.evaluate.effects import TABLE, Effects, Holding
from optpipe.evaluate.objective import NO_SCHEDULE_MS, TOLERANCE, gap, length_ms, raises, reaches, shorter
from optpipe.model.ops import COMPUTE, MARKS
from optpipe.show.lanes import memory_over_time


def chain(devices: int = 2, microbatches: int = 2, **fields: Any) -> Problem:
    costs = stage((3, 4, 2), (10, 4), offload=(5, 6, 8))
    return pipeline(devices, microbatches, AMPLE, costs, p2p_ms=1.0, **fields)


@given(problems_with_schedules(beyond=True))
def test_the_timeline_agrees_with_an_independent_event_clock(pair):
    problem, schedule = pair
    assert check(problem, schedule) == []
    seen = clock.run(problem, schedule)
    timeline = simulate(problem, schedule)
    ops = [op for program in schedule.programs for op in program.ops()]
    assert [seen.start[op] for op in ops] == pytest.approx(list(timeline.start))
    assert [seen.end[op] for op in ops] == pytest.approx(list(timeline.end))
    assert timeline.makespan_ms == pytest.approx(seen.makespan)
    lasting = [[op for op in program.ops() if op.kind not in MARKS] for program in schedule.programs]
    spans = [max(seen.end[op] for op in ops) - min(seen.start[op] for op in ops) for ops in lasting if ops]
    assert timeline.span_ms == pytest.approx(max(spans))
    items = [[item if isinstance(item, Op) else item.first for item in program] for program in schedule.programs]
    busy = [sum(seen.end[op] - seen.start[op] for op in ops if op.kind in COMPUTE) for ops in items]
    assert timeline.busy_ms() == pytest.approx([ms for ms, ops in zip(busy, lasting, strict=True) if ops])


@given(problems_with_schedules(beyond=True))
@settings(max_examples=examples(60))
def test_compiled_and_plain_loops_agree(pair):
    problem, schedule = pair
    plain = simulate(problem, schedule)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline_module, "_longest_path", _compiled)
        compiled = simulate(problem, schedule)
    assert np.array_equal(plain.start, compiled.start)
    assert np.array_equal(plain.end, compiled.end)


_compiled = timeline_module.LazyJit(timeline_module.longest_path)
_compiled._work = 10**9


@given(problems_with_schedules(beyond=True))
@settings(max_examples=examples(60))
def test_in_the_order_by_ends_nothing_comes_before_what_it_waits_for(pair):
    _, schedule = pair
    compiled, end = schedule.compiled, schedule.timeline.end
    places, (waits, _) = compiled.places, compiled.waits
    assert sorted(places) == list(range(len(places)))
    assert (np.diff(end[np.argsort(places)]) >= 0).all()
    for row in np.flatnonzero(~compiled.rows.second):
        assert all(places[needed] < places[row] for needed in waits[row] if needed >= 0)
    first = compiled.rows.first
    assert (places[first] < places[first + 1]).all()


def test_a_message_takes_the_time_of_its_sender_and_receiver():
    problem = chain(microbatches=1, messages=[{"sender": 1, "receiver": 0, "ms": 7.0}])
    assert Schedule.parse(problem, [["0F0", "0BW0"], ["1F0", "1BW0"]]).makespan_ms == (3 + 1 + 3) + (6 + 7 + 6)


def test_a_shared_link_is_one_queue():
    problem, shared = chain(4), chain(4, device={"link": "pcie0"})
    programs = [[f"{s}F0", f"{s}O0", f"{s}D0", f"{s}R0", f"{s}BW0", f"{s}F1", f"{s}BW1"] for s in range(4)]
    order = [f"{s}O0" for s in range(4)] + [f"{s}R0" for s in reversed(range(4))]
    alone = Schedule.parse(problem, programs).makespan_ms
    together = Schedule.parse(shared, programs, {"pcie0": order})
    assert check(shared, together) == []
    assert together.makespan_ms > alone
    for wrong, message in [
        ({}, "is missing"),
        ({"pcie0": order[:-1]}, "has 7 entries"),
        ({"pcie0": [*order[:-1], order[0]]}, "each to be named once"),
        ({"pcie0": [*order[:-1], "0O1"]}, "is in no program"),
        ({"pcie0": ["0R0", *order[:-1]]}, "stands before"),
        ({"pcie0": [*order[:-1], "0F0"]}, "is in no program"),
        ({"pcie0": order, "pcie1": []}, "no two devices share"),
    ]:
        assert any(message in text for text in check(shared, Schedule.parse(shared, programs, wrong))), message


def deadlock(problem: Problem, programs: list[list[str]]) -> tuple[list[str], str]:
    """The cycle as texts, and the message."""
    with pytest.raises(DeadlockError) as caught:
        simulate(problem, Schedule.parse(problem, programs))
    return [str(item) for item in caught.value.cycle], str(caught.value)


def test_a_deadlock_is_shown_on_the_grid():
    programs = [["0F0", "0F1", "0BW1", "0BW0"], ["1F0", "1BW0", "1F1", "1BW1"]]
    assert check(chain(), Schedule.parse(chain(), programs)) == []
    cycle, message = deadlock(chain(), [["0F0", "0BW0", "0F1", "0BW1"], ["1F0", "1F1", "1BW0", "1BW1"]])
    assert set(cycle) == {"0BW0", "1BW0", "1F1", "0F1"}
    sentence, *grid = message.splitlines()
    assert sentence == f"deadlock: {' waits for '.join([*cycle, cycle[0]])}"
    assert all(f"[{op}]" in message for op in cycle)
    assert "[0F0]" not in message
    assert sum(line.startswith("device") for line in grid) == 2


LATE_RELOAD = [*(f"0F{j}" for j in range(99)), "0O0", "0D0", *(f"0BW{j}" for j in range(99)), "0R0"]
PAIRS = [["0F0", "0F1+0BW0", "0F2", "0BW1", "0BW2"], ["1F0", "1F1", "1F2+1BW0", "1BW1", "1BW2"]]


@pytest.mark.parametrize(
    ("problem", "programs", "expected"),
    [
        (chain(1, 99), [LATE_RELOAD], ["0BW0", "0R0", "0BW98"]),
        (chain(2, 3, overlap_factor=0.9), PAIRS, ["0F1+0BW0", "1F2+1BW0", "0F2"]),
    ],
)
def test_a_cycle_has_no_ops_that_only_queue_and_names_pairs(problem, programs, expected):
    cycle, message = deadlock(problem, programs)
    assert cycle == expected
    assert all(f"[{op}]" in message for op in "+".join(cycle).split("+"))


def test_a_cycle_over_many_devices_says_how_many_are_left_out():
    programs = [[f"{s}F0", f"{s}F1", f"{s}BW1", f"{s}BW0"] for s in range(64)]
    programs[0] = ["0F0", "0BW0", "0F1", "0BW1"]
    cycle, message = deadlock(chain(64), programs)
    assert len(cycle) == 128
    assert message.endswith("and 48 more devices")
    assert len(message) < 3000


def test_a_length_is_the_makespan_or_the_span():
    schedule = Schedule.parse(chain(), [["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1F1", "1BW0", "1BW1"]])
    assert length_ms(schedule, "makespan") == schedule.makespan_ms
    assert length_ms(schedule, "span") == schedule.span_ms
    assert length_ms(None, "makespan") == NO_SCHEDULE_MS


@pytest.mark.parametrize("length", [0.0, 1e-3, 100.0, 1e12])
def test_rounding_neither_improves_nor_proves_anything(length: float):
    nearly = length * (1 - TOLERANCE / 2)
    assert not shorter(nearly, length)
    assert not shorter(length, length)
    assert reaches(length, nearly)
    assert not raises(length, nearly)
    assert gap(length, nearly) == 0


def test_differences_beyond_rounding_count():
    assert shorter(99.0, 100.0)
    assert shorter(100.0, NO_SCHEDULE_MS)
    assert raises(100.0, 99.0)
    assert raises(0.0, float("-inf"))
    assert not reaches(100.0, 99.0)
    assert gap(100.0, 99.0) == pytest.approx(0.01)
    assert gap(None, 99.0) is None
    assert gap(100.0, None) is None


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
def test_peaks_by_hand(more, program, peak, at):
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
def test_bytes_op_by_op_by_hand(program, during, after):
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
