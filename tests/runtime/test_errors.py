"""A failure in a step is reported with rank, op, stage and micro-batch, on the rank where it happens; on one that waits
for it, what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from support.ranks.cases import batch, loss_fn, own_stages, problem
from support.ranks.worker import Ranks
from torch import Tensor

from optpipe.errors import OptPipeError
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from optpipe_runtime.memory.host_memory import OnHost

PROGRAMS = [["0F0", "0O0", "0D0", "0F1", "0R0", "0B0", "0W0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]]
COPY = "rank 0 was at 0D0: D of stage 0, micro-batch 0; what failed is 0O0: O of stage 0, micro-batch 0"
LOSS = "rank 1 was at 1F0: F of stage 1, micro-batch 0"
WAITING = "rank 0 was at 0B0: B of stage 0, micro-batch 0, waiting for the gradient of 0B0 from rank 1"


def fail(*_: object) -> Any:
    raise ValueError("not today")


def told_of(what: str) -> list[str]:
    """A copy fails on rank 0, or the loss on rank 1. What the other rank is told, and what that came from."""
    failing, found = False, list[str]()

    def take_out(self: Any, pieces: Sequence[Tensor]) -> Any:
        return [self._link.out.run(fail)]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return fail() if failing else loss_fn(output, target)

    pipe = Pipeline(own_stages([0, 1]), [0, 1], loss, 2)
    pipe.load(Schedule.parse(problem([0, 1], 2), PROGRAMS))
    pipe.step(*batch(0, 2))
    failing, copies = what == "loss", what == "copy" and dist.get_rank() == 0
    try:
        with mock.patch.object(OnHost, "take_out", take_out) if copies else nullcontext():
            pipe.step(*batch(1, 2))
    except OptPipeError as error:
        found = [str(error), str(error.__cause__)]
    pipe.close()
    return found


@pytest.mark.parametrize(("what", "failing", "sentence", "other"), [("copy", 0, COPY, ""), ("loss", 1, LOSS, WAITING)])
def test_a_failure_names_what_failed(ranks: Ranks, what: str, failing: int, sentence: str, other: str) -> None:
    ((told, cause),) = ranks.survivors(told_of, failing, what=what)
    assert f"ValueError: not today\n{sentence}\n" in ranks.why
    assert told.startswith(other)
    assert f"rank {1 - failing} lost its connection to " in cause
