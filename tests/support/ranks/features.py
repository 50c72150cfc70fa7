"""What the ranks run in `test_features`: a runtime from which a room of `optpipe_runtime.features` is left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

from optpipe.schedule import Schedule
from optpipe_runtime import features
from support.ranks import cases


def train(room: str, schedules: Sequence[Schedule], needs: Schedule) -> tuple[Any, list[str]]:
    """As `cases.train`; and what is told to who loads a schedule with ops of the room."""
    rooms = [each for each in features.ROOMS if each.__name__ != room]
    assert len(rooms) == len(features.ROOMS) - 1
    with mock.patch.object(features, "ROOMS", rooms):
        trained = cases.train([0, 1], schedules)
        return trained, cases.refusals(lambda: cases.train([0, 1], [needs]))
