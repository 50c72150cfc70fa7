"""What the ranks run in `test_features`: a runtime from which a room of `optpipe_runtime.features` is left out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

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
    m, optimizer = schedule.problem.microbatches, torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    with without(room):
        told = cases.refusals(*(partial(pipeline, m, **{name: value}) for name, value in arguments.items()))
        with pipeline(m) as pipe:
            told += cases.refusals(lambda: pipe.load(schedule))
            return told + (cases.refusals(lambda: pipe.post_validate(optimizer)) if room == "POST_VALIDATION" else [])


def pipeline(microbatches: int, **arguments: Any) -> Pipeline:
    return Pipeline(cases.own_stages([0, 1]), [0, 1], cases.loss_fn, microbatches, **arguments)
