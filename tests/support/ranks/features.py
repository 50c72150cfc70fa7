"""What the ranks run in `test_features`: a runtime from which a room of `optpipe_runtime.features` is left out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import nn

from optpipe.errors import OptPipeError
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline, StepReport, features
from support.ranks import cases


def without(room: str) -> AbstractContextManager[object]:
    assert getattr(features, room) in features.ROOMS
    return mock.patch.object(
        features, "ROOMS", [each for each in features.ROOMS if each is not getattr(features, room)]
    )


def train(room: str, schedules: Sequence[Schedule]) -> tuple[list[StepReport], list[cases.Gradients]]:
    with without(room):
        return cases.train([0, 1], schedules)


def refused(room: str, schedule: Schedule, arguments: dict[str, Any]) -> list[str]:
    """What is told to who gives the room's `arguments`, loads a schedule with its ops, or calls its method."""
    told, m = [], schedule.problem.microbatches

    def attempt(call: Any) -> None:
        try:
            call()
        except OptPipeError as error:
            told.append(str(error))

    with without(room):
        for name, value in arguments.items():
            attempt(lambda given=value, name=name: pipeline(m, **{name: given}))
        with pipeline(m) as pipe:
            attempt(lambda: pipe.load(schedule))
            if room == "POST_VALIDATION":
                attempt(lambda: pipe.post_validate(torch.optim.SGD([nn.Parameter(torch.zeros(1))])))
    return told


def pipeline(microbatches: int, **arguments: Any) -> Pipeline:
    return Pipeline(cases.own_stages([0, 1]), [0, 1], cases.loss_fn, microbatches, **arguments)
