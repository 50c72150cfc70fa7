"""What the ranks do in the tests of `follow` and `drift`."""

from __future__ import annotations

import time
from typing import Any

import torch
from rank_cases import batch, loss_fn, numbers, own_stages
from torch import Tensor, nn

from optpipe_runtime import Follower, Pipeline


def follow(placement: list[int], microbatches: int, url: str, steps: int, **options: Any) -> tuple[list[float], list[int], Any]:
    """Trains with a follower: the last rank's losses, the versions, the scalars that rank 0 wrote."""
    rank = torch.distributed.get_rank()
    scalars: list[tuple[str, float, int]] = []

    class Written:
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            scalars.append((tag, value, step))

    modules = own_stages(placement)
    optimizer = torch.optim.SGD([p for module in modules.values() for p in module.parameters()], lr=0.1)
    losses, versions = [], []
    with (
        Pipeline(modules, placement, loss_fn, microbatches) as pipe,
        Follower(pipe, url, memory_bytes=10**9, writer=Written() if rank == 0 else None, **options) as follower,
    ):
        for step in range(steps):
            optimizer.zero_grad()
            report = follower.step(*batch(step, microbatches))
            optimizer.step()
            losses.append(report.loss)
            versions.append(report.version)
    return losses, versions, scalars
