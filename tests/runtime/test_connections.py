"""Messages between ranks, and connections that are left of a pipeline that has ended."""

from __future__ import annotations

import os

import pytest
import torch
from support.ranks import cases
from support.ranks.worker import Ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from optpipe.errors import OptPipeError
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline

WIDTH = 8


def again(schedule: Schedule, times: int) -> list[int]:
    """Connections and other files that are open after each of so many pipelines; half of them end while another is
    there."""
    rank, x, found = torch.distributed.get_rank(), torch.zeros(2, WIDTH), []
    for _ in range(times // 2):
        with cases.pipeline({rank: nn.Linear(WIDTH, WIDTH)}, schedule, mse_loss) as pipe:
            pipe.step(x, x)
            with Pipeline({rank: nn.Linear(WIDTH, WIDTH)}, [0, 1], mse_loss, 2) as other:
                other.load(schedule)
                other.step(x, x)
            pipe.step(x, x)
        found.append(len(os.listdir("/proc/self/fd")))
    return found


class Views(nn.Module):
    """Two views, of a conjugate and of a negative, as torch makes them without computing anything."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.complex(x, 2 * x).conj()
        return z, torch._neg_view(x * 3)


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.scale * torch.cat([z.real, z.imag, y], -1)


def views(schedule: Schedule) -> list[float] | None:
    """Losses by what the second rank receives."""
    rank, x = torch.distributed.get_rank(), torch.ones(2, WIDTH)
    with cases.pipeline({rank: [Views, Takes][rank]()}, schedule, mse_loss) as pipe:
        return pipe.step(x, torch.cat([x, -2 * x, -3 * x], -1)).losses


def apart(schedule: Schedule, method: str) -> str:
    """What each rank is told where rank 1 calls `step` and rank 0 another method."""
    rank, x = torch.distributed.get_rank(), torch.zeros(2, WIDTH)
    with cases.pipeline({rank: nn.Linear(WIDTH, WIDTH)}, schedule, mse_loss) as pipe:
        pipe.step(x, x)
        try:
            pipe.step(x, x) if rank else getattr(pipe, method)(*[x, x] if method == "evaluate" else [1.0])
        except OptPipeError as error:
            return str(error)
    return ""


SCHEDULE = Schedule.parse(cases.problem([0, 1], 2), [["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]])


def test_pipelines_made_one_after_the_other_leave_no_connections_behind(ranks: Ranks) -> None:
    for opened in ranks(again, schedule=SCHEDULE, times=6):
        assert opened[2] == opened[1]


def test_conjugate_and_negative_views_arrive_resolved(ranks: Ranks) -> None:
    assert ranks(views, schedule=SCHEDULE) == [None, [0.0, 0.0]]


@pytest.mark.parametrize("method", ["evaluate", "clip_grad_norm_", "gather", "load"])
def test_a_rank_that_finds_that_another_calls_something_else_says_so(ranks: Ranks, method: str) -> None:
    """The other one, which may be in the middle of its step, then loses it."""
    told = ranks.to_the_end(apart, schedule=SCHEDULE, method=method)
    found = [sentence.partition(", and another rank something else")[0] for sentence in told]
    assert f"rank 0 has called {method}" in found or "rank 1 has called step" in found
    assert all("has called" in sentence or "lost its connection" in sentence for sentence in told)
