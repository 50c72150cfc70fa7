"""The runtime without one room of features is whole: plain schedules run as before, bit by bit, and ops of the room are
refused in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.ranks import cases
from support.ranks.programs import OFFLOADED, ONE_F_ONE_B, programs
from support.ranks.worker import Ranks

from optpipe.schedule import Schedule
from optpipe_runtime import features


def train_without(room: str, schedules: Sequence[Schedule], needs: Schedule) -> tuple[Any, list[str]]:
    """As `cases.train`; and what is told to who loads a schedule with ops of the room."""
    rooms = [each for each in features.ROOMS if each.__name__ != room]
    assert len(rooms) == len(features.ROOMS) - 1
    with mock.patch.object(features, "ROOMS", rooms):
        trained = cases.train([0, 1], schedules)
        return trained, cases.refusals(lambda: cases.train([0, 1], [needs]))


PLAIN = [Schedule.parse(cases.problem([0, 1], 4), texts) for texts in (ONE_F_ONE_B, OFFLOADED)]
NEEDS = {
    "Evictions": Schedule.parse(
        cases.problem([0, 1], 2, [1, None]),
        programs("0F0 0E0 0D0 0L0 0BW0 0F1 0BW1", "1A0 1F0 1BW0 1V0 1F1 1BW1"),
    ),
    "HostUpdates": Schedule.parse(
        cases.problem([0, 1], 2, gradient_out_ms=1.0, update_ms=1.0, parameters_in_ms=1.0),
        programs("0P0 0F0 0F1 0BW0 0BW1 0G0 0U0", "1F0 1BW0 1F1 1BW1"),
    ),
}


@pytest.mark.parametrize("room", [room.__name__ for room in features.ROOMS])  # type: ignore[attr-defined]
def test_the_runtime_without_a_room_is_whole(ranks: Ranks, room: str) -> None:
    whole = ranks(cases.train, placement=[0, 1], schedules=PLAIN)
    found = ranks(train_without, room=room, schedules=PLAIN, needs=NEEDS.get(room, PLAIN[0]))
    for ((reports, gradients), told), (expected, same) in zip(found, whole, strict=True):
        assert [report.losses for report in reports] == [report.losses for report in expected]
        np.testing.assert_equal(gradients, same)
        assert [sentence.split(" in the program")[0] for sentence in told] == (
            [f"rank 0: {'0E0' if room == 'Evictions' else '0P0'}"] if room in NEEDS else []
        )
