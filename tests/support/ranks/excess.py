"""What the ranks run in `test_excess`: a stage that saves more for some micro-batches than for the profiled one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline, StepReport
from support.ranks.swaps import heard

WIDTH, ROWS = 256, 8


class Sometimes(nn.Module):
    """Two more activations where the first number is large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x).tanh()
        return y.tanh().tanh() if x[0, 0] > 100 else y


def inputs(microbatches: int, large: Sequence[int] = ()) -> Tensor:
    torch.manual_seed(0)
    batch = torch.randn(microbatches * ROWS, WIDTH)
    batch[[j * ROWS for j in large], 0] = 1000.0
    return batch


def profiled_then_large(
    programs: Sequence[Sequence[str]], large: Sequence[int]
) -> tuple[Problem, list[StepReport], list[str]]:
    """Profiles with a usual batch; then a usual step, two with `large` micro-batches, and one of them after a swap.
    What the log says."""
    microbatches = sum(text.startswith("0F") for text in programs[0])
    rank = torch.distributed.get_rank()
    with Pipeline({rank: Sometimes()}, [0, 1], functional.mse_loss, microbatches) as pipe, heard() as told:
        usual, targets = inputs(microbatches), torch.zeros(microbatches * ROWS, WIDTH)
        problem = pipe.profile(usual, targets, activation_budget_bytes=10**9, repeats=1)
        told.clear()
        pipe.load(Schedule.parse(problem, programs))
        reports = [pipe.step(usual, targets, trace=True)]
        reports += [pipe.step(inputs(microbatches, large), targets, trace=True) for _ in range(2)]
        stays = [[text for text in program if text[1] not in "ODR"] for program in programs]
        pipe.load(Schedule.parse(problem, stays))
        reports.append(pipe.step(inputs(microbatches, large), targets, trace=True))
        return problem, reports, [line for line in told if "certified" in line]
