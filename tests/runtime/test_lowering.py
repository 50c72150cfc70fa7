"""What a rank runs: messages match pair by pair, no rank waits for ever, and a schedule that cannot run here is
refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import cases
from support.ranks.channels import run_by_hand
from support.strategies import schedules

from optpipe.errors import ScheduleError
from optpipe.model.ops import Kind
from optpipe.schedule import Schedule
from optpipe_runtime.lowering import prepare as preparing
from optpipe_runtime.lowering.actions import AHEAD
from optpipe_runtime.lowering.prepare import prepare
from optpipe_runtime.ranks.layout import Layout

PLACEMENTS = [[0, 1], [0, 1, 1, 0], [0, 1, 0, 1], [0, 1, 2], [0, 1, 2, 2, 1, 0], [1, 0]]


@settings(max_examples=150)
@given(st.data(), st.sampled_from(PLACEMENTS), st.integers(1, 4))
def test_messages_match_in_any_valid_schedule(data: Any, placement: list[int], microbatches: int) -> None:
    problem = cases.problem(placement, microbatches, offload_parts=2)
    schedule = data.draw(schedules(problem))
    run_by_hand([prepare(schedule, rank, Layout.of(problem)) for rank in range(max(placement) + 1)])


def test_few_receives_are_posted_if_the_order_is_simple() -> None:
    problem = cases.problem([0, 1], 6)
    forwards = [f"0F{j}" for j in range(6)]
    programs = [forwards + [f"0BW{j}" for j in range(6)], [f"1{kind}{j}" for j in range(6) for kind in ("F", "BW")]]
    most = run_by_hand([prepare(Schedule.parse(problem, programs), rank, Layout.of(problem)) for rank in range(2)])
    assert most == {0: AHEAD, 1: AHEAD}


def test_receives_are_posted_in_the_senders_order() -> None:
    problem = cases.problem([0, 1], 2)
    programs = [["0F1", "0F0", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]]
    plan = prepare(Schedule.parse(problem, programs), 1, Layout.of(problem))
    assert [message.microbatch for message, _ in plan.actions[0].post] == [1, 0]


def test_the_peak_of_host_memory_is_counted() -> None:
    problem = cases.problem([0], 2, offload_parts=2)
    texts = [
        "0F0",
        "0O0",
        "0O0.1",
        "0D0",
        "0D0.1",
        "0F1",
        "0O1",
        "0D1",
        "0R0",
        "0R0.1",
        "0BW0",
        "0O1.1",
        "0D1.1",
        "0R1",
        "0R1.1",
        "0BW1",
    ]
    plan = prepare(Schedule.parse(problem, [texts]), 0, Layout.of(problem))
    assert plan.host_peak(lambda stage, part: (10, 1)[part]) == 21, "both of part 0, one of part 1"


FINE = [["0F0", "0BW0"], ["1F0", "1BW0"]]


@pytest.mark.parametrize(
    ("programs", "placement", "microbatches", "sentence"),
    [
        (FINE, [1, 0], 1, r"places its stages on devices \[0, 1\], this pipeline on \[1, 0\]"),
        (FINE, [0, 1], 2, "is for 1 micro-batches, this pipeline runs 2"),
        ([["0F0", "0BW0"], ["1F0"]], [0, 1], 1, "stage 1, micro-batch 0 has no backward"),
        ([["0F0", "0BW0"], ["1F0", "1O0", "1D0", "1BW0"]], [0, 1], 1, "has no reload"),
    ],
)
def test_a_schedule_that_cannot_run_here_is_refused(
    programs: Any, placement: list[int], microbatches: int, sentence: str
) -> None:
    schedule = Schedule.parse(cases.problem([0, 1], 1), programs)
    with pytest.raises(ScheduleError, match=sentence):
        prepare(schedule, 0, Layout.make(placement, microbatches))


def test_a_schedule_must_fit_the_measured_problem() -> None:
    schedule = Schedule.parse(cases.problem([0, 1], 1), FINE)
    larger = cases.problem([0, 1], 1, activation_bytes=10**10)
    with pytest.raises(ScheduleError, match="device 0 needs 10000000000 bytes during 0F0 and has 1000000000"):
        prepare(schedule, 0, Layout.make([0, 1], 1), larger)


def test_an_op_that_the_executor_has_no_code_for_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cases.problem([0, 1], 1)
    schedule = Schedule.parse(problem, [["0F0", "0BW0"], ["1F0", "1C0", "1BW0"]])
    monkeypatch.setattr(preparing, "RUNS", (Kind.F, Kind.BW))
    for rank in range(2):
        with pytest.raises(ScheduleError, match=r"^1C0 in the program of device 1: this executor runs F, BW, not C$"):
            prepare(schedule, rank, Layout.of(problem))
