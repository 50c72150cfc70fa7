"""Stages some of whose weight gradients come at B."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from optpipe_runtime import Pipeline
from optpipe_runtime.measure.at_b import AtB
from support.ranks.swaps import heard

WIDTH, BATCH = 64, 512


class Blended(nn.Module):
    """Its weight is computed from another, so the gradient comes at B, and takes nearly all of B's time."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.linear(torch.ones(20 * BATCH, WIDTH), torch.tanh(self.raw)).sum() / BATCH


class Normed(nn.Module):
    """nn.LayerNorm itself would not be compiled, being torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(self.norm(x))
        return made


def profiled() -> tuple[dict[int, AtB], list[str], list[bool]]:
    """What is found, what is logged, and what is trained afterwards."""
    rank = dist.get_rank()
    stage = [nn.Sequential(nn.Linear(WIDTH, WIDTH), Normed()), nn.Sequential(nn.Linear(WIDTH, WIDTH), Blended())][rank]
    if rank == 0:
        stage[1].compile(backend="eager")
    x = torch.ones(2 * BATCH, WIDTH)
    with heard() as logged, Pipeline({rank: stage}, [0, 1], functional.mse_loss, 2) as pipe:
        pipe.profile(x, x, 10**9, repeats=3)
        assert pipe.measured is not None
        return dict(pipe.measured.at_b), list(logged), [parameter.requires_grad for parameter in stage.parameters()]
