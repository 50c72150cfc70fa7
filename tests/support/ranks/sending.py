"""What the ranks run in `test_messages`: stages that note which of the tensors that they have sent are still there."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline, StepReport

ROWS, WIDTH = 64, 512
MESSAGE_BYTES = ROWS * WIDTH * 4


class Sends(nn.Module):
    """A linear layer, which does not save its output. `held` is how many outputs were there when the next was made."""

    def __init__(self, part_of: int = 1, takes_s: float = 0.0) -> None:
        super().__init__()
        self.layer, self.part_of, self.takes_s = nn.Linear(WIDTH, WIDTH), part_of, takes_s
        self.held: list[int] = []
        self._sent: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        self.held.append(self.still_there())
        time.sleep(self.takes_s)
        y: Tensor = self.layer(x)
        if self.part_of > 1:  # a view of much more
            y = torch.cat([y] * self.part_of)[: len(y)]
        self._sent.append(StorageWeakRef(y.untyped_storage()))
        return y

    def still_there(self) -> int:
        return sum(not reference.expired() for reference in self._sent)


def burst(schedule: Schedule, part_of: int) -> tuple[list[int], int, StepReport]:
    """A step in which the second rank is slower than the first. How many messages were there at each forward and after
    the step."""
    rank, m = dist.get_rank(), schedule.problem.microbatches
    stage = Sends(part_of, takes_s=0.01 * rank)
    x = torch.ones(m * ROWS, WIDTH)
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "microbatches": m}
    with Pipeline({rank: stage}, range(2), **options) as pipe:
        pipe.load(schedule)
        pipe.step(x, x)
        stage.held.clear()
        report = pipe.step(x, x)
        return stage.held, stage.still_there(), report
