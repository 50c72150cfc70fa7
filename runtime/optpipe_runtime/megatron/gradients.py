"""What becomes of Megatron's gradients: at the end of a step, and in a profile, which leaves them as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from optpipe_runtime.megatron.chunk import Step
from optpipe_runtime.stage.split import main_grad

MARK = "grad_added_to_main_grad"  # set on a parameter by layers that add to its buffer themselves


@contextmanager
def without_sync(config: Any) -> Iterator[None]:
    """In the context that keeps Megatron's DistributedDataParallel from reducing gradients, of every chunk."""
    given = config.no_sync_func
    contexts = [] if given is None else given if isinstance(given, list) else [given]
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


def finalize_gradients(config: Any, chunks: list[nn.Module], step: Step, groups: Any, force_all_reduce: bool) -> None:
    """Megatron's own end of a step: reductions over data-parallel ranks, tied embeddings, scales by tokens."""
    if config.finalize_model_grads_func is not None:
        tokens = sum(step.tokens.values(), torch.zeros([], dtype=torch.int, device=_device(chunks)))
        config.finalize_model_grads_func(
            chunks,
            tokens if config.calculate_per_token_loss else None,
            pg_collection=groups,
            force_all_reduce=force_all_reduce,
        )


@contextmanager
def main_grads_unchanged(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """After this context Megatron's gradient buffers and their marks are what they were. Meanwhile the host has a copy:
    a device may have no room for a second one."""
    buffers = {p: buffer for chunk in chunks for p in chunk.parameters() if (buffer := main_grad(p)) is not None}
    before = [(p, buffer.to("cpu", copy=True), getattr(p, MARK, None)) for p, buffer in buffers.items()]
    try:
        yield
    finally:
        for parameter, gradient, mark in before:
            buffers[parameter].copy_(gradient)
            if mark is not None:
                setattr(parameter, MARK, mark)


def _device(chunks: Sequence[nn.Module]) -> torch.device:
    return next((parameter.device for chunk in chunks for parameter in chunk.parameters()), torch.device("cpu"))
