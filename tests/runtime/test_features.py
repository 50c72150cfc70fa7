"""The runtime without one room of features is whole: plain schedules run as before, bit by bit, and what needs the room
is refused in one sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.ranks import cases
from support.ranks import features as without_rooms
from support.ranks.programs import OFFLOADED, ONE_F_ONE_B, programs
from support.ranks.worker import Ranks

from optpipe.schedule import Schedule
from optpipe_runtime import features

ROOMS = ["EVICTIONS", "WINDOWS", "HOST_UPDATES", "POST_VALIDATION"]
EVICTED = programs("0F0 0E0 0D0 0L0 0BW0 0F1 0BW1", "1A0 1F0 1BW0 1V0 1F1 1BW1")
UPDATED = programs("0P0 0F0 0F1 0BW0 0BW1 0G0 0U0", "1F0 1BW0 1F1 1BW1")
LEFT_OUT = "was given: this runtime was made without the feature that takes it"


def test_every_room_is_here() -> None:
    assert [getattr(features, name) for name in ROOMS] == list(features.ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_what_needs_no_room_runs_as_before(ranks: Ranks, room: str) -> None:
    problem = cases.problem([0, 1], 4)
    schedules = [Schedule.parse(problem, texts) for texts in (ONE_F_ONE_B, OFFLOADED)]
    whole = ranks(cases.train, placement=[0, 1], schedules=schedules)
    for (reports, gradients), (expected, same) in zip(
        ranks(without_rooms.train, room=room, schedules=schedules), whole, strict=True
    ):
        assert [report.losses for report in reports] == [report.losses for report in expected]
        assert [report.peak_activation_bytes for report in reports] == [
            report.peak_activation_bytes for report in expected
        ]
        np.testing.assert_equal(gradients, same)


NEEDS: dict[str, tuple[Schedule, dict[str, Any], list[str]]] = {
    "EVICTIONS": (
        Schedule.parse(cases.problem([0, 1], 2, [1, None]), EVICTED),
        {"peers": [1, None]},
        [f"peers {LEFT_OUT}", "rank 0: 0E0 in the program of device 0: this executor runs "],
    ),
    "WINDOWS": (
        Schedule.parse(cases.problem([0, 1], 4), ONE_F_ONE_B),
        {"whole_gradients": 1},
        [f"whole_gradients {LEFT_OUT}"],
    ),
    "HOST_UPDATES": (
        Schedule.parse(
            cases.problem([0, 1], 2, gradient_out_ms=1.0, update_ms=1.0, parameters_in_ms=1.0),
            UPDATED,
        ),
        {"host_optimizers": {0: None}, "clip_host_updates": True},
        [
            f"host_optimizers {LEFT_OUT}",
            f"clip_host_updates {LEFT_OUT}",
            "rank 0: 0P0 in the program of device 0: this executor runs F, B, W, BW, C, O, D, R, E, L, A, V, not P",
        ],
    ),
    "POST_VALIDATION": (
        Schedule.parse(cases.problem([0, 1], 4), ONE_F_ONE_B),
        {},
        ["post_validate: this runtime was made without the feature"],
    ),
}


@pytest.mark.parametrize("room", ROOMS)
def test_what_needs_the_room_is_refused(ranks: Ranks, room: str) -> None:
    schedule, arguments, told = NEEDS[room]
    for found in ranks(without_rooms.refused, room=room, schedule=schedule, arguments=arguments):
        assert [sentence[: len(start)] for sentence, start in zip(found, told, strict=True)] == told
