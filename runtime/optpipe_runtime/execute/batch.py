"""Cuts a batch into micro-batches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from optpipe.errors import InputError
from optpipe_runtime.stage.io import Tensors


def cut(batch: Any, microbatches: int, name: str) -> list[Tensors]:
    """Equal micro-batches along the first dimension. Raises `InputError` if the batch does not divide."""
    tensors = batch if isinstance(batch, tuple | list) else (batch,)
    if not tensors:
        raise InputError(f"{name} is empty: this rank needs a tensor, or a tuple of tensors, of the whole batch")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise InputError(
                f"{name} is {type(tensor).__name__}: this rank needs a tensor, or a tuple of tensors, of the "
                "whole batch"
            )
        if tensor.requires_grad:
            raise InputError(f"{name} requires a gradient, and a step computes those of parameters only: detach it")
        if tensor.dim() == 0 or len(tensor) == 0 or len(tensor) % microbatches:
            raise InputError(
                f"{name} has shape {list(tensor.shape)}: its first dimension must be a multiple of the "
                f"{microbatches} micro-batches"
            )
    # By `data`, so that a change of one micro-batch in place does not count as a change of the others.
    return list(
        zip(*([part.data for part in tensor.split(len(tensor) // microbatches)] for tensor in tensors), strict=True)
    )
