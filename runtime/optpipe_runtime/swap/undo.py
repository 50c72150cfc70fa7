"""Undoes a step that does not count, such as one that has run out of memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from optpipe.errors import OptPipeError
from optpipe_runtime.execute.batch import Batch
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.stage.state import save_random


def snapshot(rank: Rank, batch: Batch) -> Callable[[], None]:
    """Saves what a step changes on this rank: gradients, what else forwards change in modules, a batch that stages
    change in place, and random numbers. Returns a function that restores it."""
    restores = [stage.replay.snapshot() for stage in rank.stages.values()]
    of_batch = [io for stage in rank.stages.values() for io in stage.io.values() if io.begins or io.ends]
    copies: list[tuple[Tensor, Tensor]] = []
    if any(io.changes_inputs for io in of_batch):
        copies = [(tensor, tensor.clone()) for tensor in batch.tensors()]
    restore_random = save_random(rank.device)

    def restore() -> None:
        for restore_stage in restores:
            restore_stage()
        for tensor, copy in copies:
            tensor.data.copy_(copy)
        restore_random()

    return restore


def ran_out(error: BaseException) -> bool:
    """Whether the device, the host or the host pool had too little memory, and nothing else is wrong."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or type(error) is OptPipeError
