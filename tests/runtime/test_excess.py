"""Bytes held after every op compared with the certificate. A step that holds more says after which op."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.ranks import cases, excess
from support.ranks.calls import measured
from support.ranks.worker import Ranks
from support.strategies import schedules

from optpipe.model.problem import Problem
from optpipe.schedule import Schedule

PROGRAMS = [
    ["0F0", "0O0", "0F1", "0D0", "0F2", "0B1", "0R0", "0W1", "0BW0", "0BW2"],
    ["1F0", "1F1", "1BW1", "1BW0", "1F2", "1BW2"],
]


def test_a_microbatch_that_saves_more_than_was_profiled_is_named(ranks: Ranks) -> None:
    more = 2 * excess.ROWS * excess.WIDTH * 4  # bytes: the results of two tanh
    (problem, reports, told), (_, others, nothing) = ranks(excess.profiled_then_large, programs=PROGRAMS, large=[2])
    usual, first, again, swapped = (report.excess for report in reports)
    assert usual is None
    assert first is not None
    assert (str(first.op), first.held_bytes - first.certified_bytes) == ("0F2", more)
    assert again == first
    assert swapped is not None
    assert str(swapped.op) == "0F2"
    assert told == [
        f"rank 0 holds {found.held_bytes} bytes after 0F2, {found.certified_bytes} are certified"
        for found in (first, swapped)
    ], "once for each schedule"
    assert [report.excess for report in others] == [None] * 4
    assert nothing == []
    for report in reports[:3]:
        assert [time.certified_bytes for time in report.trace] == certified(problem)
    assert [time.held_bytes for time in reports[0].trace] == certified(problem), (
        "the profile's batch holds what was profiled"
    )
    extra = [time.held_bytes - time.certified_bytes for time in reports[1].trace]
    assert extra == [0, 0, 0, 0, *[more] * 5, 0], "from 0F2 to its backward"


def certified(problem: Problem) -> list[int]:
    compiled = Schedule.parse(problem, PROGRAMS).compiled
    found: list[int] = compiled.held.after[compiled.rows.of_device(0)].tolist()
    return found


@settings(max_examples=examples(10))
@given(st.data(), st.sampled_from([((0, 1), (None, None)), ((0, 1, 1, 0), (1, 0))]))
def test_no_op_holds_more_than_certified(ranks: Ranks, data: Any, where: tuple[Any, Any]) -> None:
    placement, peers = where
    schedule = data.draw(schedules(measured(ranks, placement, peers)))
    for (report,), _ in ranks(cases.train, placement=placement, schedules=[schedule]):
        assert report.excess is None
        assert all(0 <= time.held_bytes <= time.certified_bytes for time in report.trace)
        assert max(time.held_bytes for time in report.trace) == report.peak_activation_bytes
        assert report.trace[-1].held_bytes == 0
