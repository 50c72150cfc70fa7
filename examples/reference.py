"""The same model, data and optimizer in one plain process. The losses of the pipeline must equal its losses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from examples import gpt
from examples.text import Microbatch, batch, corpus


def losses(size: gpt.Size, stages: int, microbatches: int, steps: int) -> list[float]:
    """The mean loss of each step, of micro-batches of one length."""
    text = corpus()
    wholes = (batch(text, step, microbatches * size.sequences, size.context) for step in range(steps))
    cut = (
        [Microbatch(*pair) for pair in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True)]
        for x, y in wholes
    )
    return list(trained(size, stages, cut))


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


def difference(losses: Sequence[float], plain: Sequence[float]) -> float:
    """The largest relative difference of a loss."""
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, plain, strict=True))
