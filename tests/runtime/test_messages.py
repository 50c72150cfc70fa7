"""What messages hold: at most two to a rank are under way, however slow the receiver is, and no more than the plan
says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.ranks import cases, sending
from support.ranks.calls import same
from support.ranks.sending import MESSAGE_BYTES
from support.ranks.worker import Ranks
from support.strategies import schedules

from optpipe.model.ops import Kind
from optpipe.schedule import Schedule
from optpipe_runtime.execute.messages import messages_reserve
from optpipe_runtime.lowering.plan import UNDER_WAY
from optpipe_runtime.lowering.prepare import prepare
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.stage.io import Spec, StageIO

MICROBATCHES = 16


def all_forwards_first() -> Schedule:
    programs = [[f"{s}{kind}{j}" for kind in ("F", "BW") for j in range(MICROBATCHES)] for s in range(2)]
    return Schedule.parse(cases.problem([0, 1], MICROBATCHES), programs)


@pytest.mark.parametrize("part_of", [1, 4])
def test_at_most_two_messages_are_under_way(ranks: Ranks, part_of: int) -> None:
    """Also where what is sent is a view of much more."""
    schedule = all_forwards_first()
    (held, left, first), (_, _, second) = ranks(sending.burst, schedule=schedule, part_of=part_of)
    assert len(held) == MICROBATCHES
    assert max(held) < UNDER_WAY, "before the next is made, one is left"
    assert left <= UNDER_WAY, "until the next step begins"
    for rank, report in enumerate((first, second)):
        plan = prepare(schedule, rank, Layout.from_problem(schedule.problem))
        certified = plan.message_peak(lambda message: MESSAGE_BYTES)
        assert report.buffer_peak_bytes == report.buffer_certified_bytes == certified
    assert first.buffer_peak_bytes < 6 * MESSAGE_BYTES


@settings(max_examples=examples(5))
@given(st.data(), st.sampled_from([[0, 1, 2, 3], [0, 1, 2, 3, 3, 2, 1, 0], [2, 0, 3, 1, 0, 2]]))
def test_four_ranks_hold_in_any_valid_schedule_what_the_plan_says(
    four_ranks: Ranks, data: Any, placement: list[int]
) -> None:
    schedule = data.draw(schedules(cases.problem(placement, 3)))
    same(four_ranks, placement, [[program.texts() for program in schedule.programs]], exact=False)


def test_the_plan_counts_receives_and_sends() -> None:
    schedule = all_forwards_first()
    layout = Layout.from_problem(schedule.problem)
    sizes = {Kind.F: 10, Kind.B: 1}
    peaks = [prepare(schedule, rank, layout).message_peak(lambda message: sizes[message.kind]) for rank in range(2)]
    evaluating = [
        prepare(schedule, rank, layout).message_peak(lambda message: sizes[message.kind], evaluating=True)
        for rank in range(2)
    ]
    assert evaluating[0] == 20, "two forwards under way, and no gradients"
    assert peaks[0] >= 20
    assert peaks[1] == evaluating[1] == 20, "one arrives while the other is used"


def test_what_messages_may_hold_is_set_aside() -> None:
    """Two each way for each neighbour; of a stage on this rank nothing."""
    layout = Layout.make([0, 1, 1, 2], 4)
    large, small = Spec((10,), torch.float32, True), Spec((3,), torch.float32, True)
    outputs = [(large,), (small,), (small,), ()]
    io = {
        (s, 0): StageIO(
            inputs=outputs[s - 1] if s else (),
            begins=s == 0,
            ends=s == 3,
            outputs=outputs[s],
            reached=(frozenset({0}),) if s < 3 else (),
            needed=(0,) if s < 3 else (),
        )
        for s in range(4)
    }
    assert [messages_reserve(rank, layout, io) for rank in range(3)] == [160, 160 + 48, 48]
