"""Stages and a host link that take a given time and no processor. So ranks that share cores behave as if they did
not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from optpipe_runtime.memory.engines import CopyEngine, Handle
from optpipe_runtime.pipeline import Pipeline
from optpipe_runtime.stage.split import weight_grads

SHAPE = (64, 256)  # of what passes between two stages, for one micro-batch
LONG = 512  # tokens of a document whose attention takes as long as all else
PACKED_WIDTH = 32  # of a token, where micro-batches are documents


class Times(NamedTuple):
    """The time of each op, in ms; `copy` is that of an offload and of a reload. A forward saves `saved` times its
    input."""

    forward: float
    backward_input: float
    backward_weight: float
    copy: float
    saved: int = 1

    def of_documents(self, lengths: Tensor) -> Times:
        """If the times are those of two documents of `LONG` / 2 tokens, those of documents of these lengths."""
        work = float((lengths * (1 + lengths / LONG)).sum()) / (1.5 * LONG)
        return self._replace(**{name: work * getattr(self, name) for name in self._fields[:4]})


class SleepingStage(nn.Module):
    """Its F, B and W sleep, for as long as documents of these lengths take, if there are some. A forward saves one
    tensor."""

    def __init__(self, times: Times) -> None:
        super().__init__()
        self.times = times
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        times = self.times if lengths is None else self.times.of_documents(lengths)
        result: Tensor = _Sleep.apply(x, self.weight, times)  # type: ignore[no-untyped-call]
        return result


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, times: Times) -> Tensor:
        ctx.weight, ctx.times = weight, times
        ctx.save_for_backward(torch.cat([x] * times.saved))
        time.sleep(times.forward / 1e3)
        return x + 0.0

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        time.sleep(ctx.times.backward_input / 1e3)

        def weight_gradient() -> tuple[None]:
            time.sleep(ctx.times.backward_weight / 1e3)
            return (None,)

        return dy, *weight_grads((ctx.weight,), weight_gradient, x, dy), None


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Saves nothing."""
    return output.mean()


class PacedEngine:
    """A copy engine whose transfers take `ms` each."""

    def __init__(self, engine: CopyEngine, ms: float) -> None:
        self._engine, self._s = engine, ms / 1e3

    def run(self, work: Callable[[], object]) -> Handle:
        def paced() -> None:
            time.sleep(self._s)
            work()

        return self._engine.run(paced)

    def close(self) -> None:
        self._engine.close()


def slow_down_copies(pipe: Pipeline, ms: float) -> None:
    """From now on a copy over the pipeline's host link takes `ms`. Each activation of `SleepingStage` is one copy."""
    link = pipe.runner.rank.link
    link.out = link.back = PacedEngine(link.out, ms)
