"""The same model, data and optimizer in one plain process. The losses of the pipeline must equal its losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from optpipe_runtime.demo import gpt
from optpipe_runtime.demo.text import Microbatch, batch, corpus


def losses(
    size: gpt.Size, stages: int, microbatches: int, steps: int, told: Callable[[int], object] = lambda _: None
) -> list[float]:
    """The mean loss of each step of the demo. `told` is called after each step with how many there were."""
    text, means = corpus(), []

    def step(number: int) -> list[Microbatch]:
        whole = batch(text, number, microbatches * size.sequences, size.context)
        return [Microbatch(x, y) for x, y in zip(*(part.chunk(microbatches) for part in whole), strict=True)]

    for loss in trained(size, stages, map(step, range(steps))):
        means.append(loss)
        told(len(means))
    return means


def trained(size: gpt.Size, stages: int, steps: Iterable[Sequence[Microbatch]]) -> Iterator[float]:
    """The mean loss over the tokens of each step: gradients accumulated over micro-batches by plain autograd, AdamW as
    in the pipeline."""
    modules = gpt.stages(size, stages)
    optimizer = gpt.optimizer(modules)
    for step in steps:
        optimizer.zero_grad()
        tokens, mean = sum(y.numel() for _, y, _ in step), 0.0
        for x, y, lengths in step:
            for module in modules:
                x = module(x, lengths)
            loss = gpt.loss(x, y) * (y.numel() / tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            mean += loss.item()
        optimizer.step()
        yield mean
