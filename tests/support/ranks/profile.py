"""What the ranks run in `test_profiler`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from optpipe_runtime import Pipeline
from optpipe_runtime.measure.measured import Measured
from optpipe_runtime.memory.engines import CopyEngine, Handle
from support.ranks.cases import WIDTH, batch, loss_fn, own_stages

Span = tuple[float, float]  # on the machine's clock


class Recorded:
    """An engine whose transfers take `s` seconds more, and are noted."""

    def __init__(self, engine: CopyEngine, s: float) -> None:
        self._engine, self._s = engine, s
        self.spans: list[Span] = []

    def run(self, work: Callable[[], object]) -> Handle:
        def slowly() -> None:
            start = time.perf_counter()
            time.sleep(self._s)
            work()
            self.spans.append((start, time.perf_counter()))

        return self._engine.run(slowly)

    def close(self) -> None:
        self._engine.close()


def copies(
    placement: Sequence[int],
    copy_s: Sequence[float],
    full_duplex: bool = False,
    links: Sequence[str | None] | None = None,
) -> tuple[Measured, list[Span], list[Span]]:
    """Profiles where a rank's copies take so long; when they ran, out and back."""
    rank = torch.distributed.get_rank()
    with Pipeline(own_stages(placement), placement, loss_fn, 2, full_duplex=full_duplex, links=links) as pipe:
        link = pipe._rank.link
        down = up = Recorded(link.out, copy_s[rank])
        if full_duplex:
            up = Recorded(link.back, copy_s[rank])
        link.out, link.back = down, up
        pipe.profile(*batch(0, 2), activation_budget_bytes=10**9, repeats=3)
        assert pipe.measured is not None
        return pipe.measured, down.spans, up.spans


def transfer_mode(full_duplex: bool | None) -> str:
    with Pipeline(own_stages([0, 1]), [0, 1], loss_fn, 2, full_duplex=full_duplex) as pipe:
        return pipe.profile(*batch(0, 2), activation_budget_bytes=10**9, repeats=1).transfer_mode


def two_routes(loss_s: float) -> Measured:
    """Stage 1 is the last of the first route, which one of four micro-batches takes; the others go on to stage 2. The
    loss takes long."""
    placement = [0, 1, 0]
    rank = torch.distributed.get_rank()
    stages: dict[int, nn.Module] = {s: nn.Linear(WIDTH, WIDTH) for s, owner in enumerate(placement) if owner == rank}

    def slow(output: Tensor, target: Tensor) -> Tensor:
        time.sleep(loss_s)
        return functional.mse_loss(output, target)

    x: Any = torch.randn(8, WIDTH)
    with Pipeline(stages, placement, slow, 4, routes=[[0, 1], [0, 1, 2]], microbatch_routes=[0, 1, 1, 1]) as pipe:
        pipe.profile(x, x, activation_budget_bytes=10**9, repeats=3)
        assert pipe.measured is not None
        return pipe.measured


def changing_the_batch() -> bool:
    """Whether the batch stays as it was where the first stage and the loss change it in place."""
    rank, batch = torch.distributed.get_rank(), torch.ones(2, 4, 8)
    stages = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)), nn.Linear(8, 8)]
    inputs, targets = -batch, batch.clone()
    with Pipeline({rank: stages[rank]}, [0, 1], lambda y, target: (y - target.mul_(0.5)).square().mean(), 2) as pipe:
        pipe.profile(inputs, targets, activation_budget_bytes=10**9, repeats=1)
    return torch.equal(inputs, -batch) and torch.equal(targets, batch)
