"""The same model, data and optimizer in one plain process. The losses of the pipeline must equal its losses."""

from __future__ import annotations

import sys

import torch

from optpipe_runtime.demo import gpt
from optpipe_runtime.demo.text import batch, corpus


def losses(size: gpt.Size, stages: int, microbatches: int, steps: int) -> list[float]:
    """The mean loss of each step: gradients accumulated over micro-batches by plain autograd, AdamW as in the
    pipeline."""
    model = torch.nn.Sequential(*gpt.stages(size, stages))
    optimizer = torch.optim.AdamW(model.parameters(), lr=gpt.LEARNING_RATE)
    text = corpus()
    found = []
    for step in range(steps):
        inputs, targets = batch(text, step, microbatches * size.sequences, size.context)
        optimizer.zero_grad()
        pieces = []
        for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            loss = gpt.loss(model(x), y)
            (loss / microbatches).backward()  # type: ignore[no-untyped-call]
            pieces.append(loss.item())
        optimizer.step()
        found.append(sum(pieces) / microbatches)
        print(f"\rplain run: step {step + 1} of {steps}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found
