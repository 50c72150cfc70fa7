"""The same model, data and optimizer in one plain process. The losses of the pipeline must equal its losses."""

from __future__ import annotations

from collections.abc import Callable

import torch

from optpipe_runtime.demo import gpt
from optpipe_runtime.demo.text import batch, corpus


def losses(
    size: gpt.Size, stages: int, microbatches: int, steps: int, told: Callable[[int], object] = lambda _: None
) -> list[float]:
    """The mean loss of each step: gradients accumulated over micro-batches by plain autograd, AdamW as in the
    pipeline. `told` is called after each step with how many there were."""
    model = torch.nn.Sequential(*gpt.stages(size, stages))
    optimizer = torch.optim.AdamW(model.parameters(), lr=gpt.LEARNING_RATE)
    text = corpus()
    means = []
    for step in range(steps):
        inputs, targets = batch(text, step, microbatches * size.sequences, size.context)
        optimizer.zero_grad()
        pieces = []
        for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            loss = gpt.loss(model(x), y)
            (loss / microbatches).backward()  # type: ignore[no-untyped-call]
            pieces.append(loss.item())
        optimizer.step()
        means.append(sum(pieces) / microbatches)
        told(step + 1)
    return means
