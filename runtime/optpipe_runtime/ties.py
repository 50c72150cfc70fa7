"""Tied parameters: copies of one parameter on several ranks, such as an embedding in the first stage that is the head in the last."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optpipe.errors import InputError
from optpipe_runtime.agreement import Council


class Tie:
    """Copies that start equal and get the sum of their gradients after every step, so that equal optimizers keep them equal. Collective."""

    def __init__(self, parameter: nn.Parameter | None, council: Council) -> None:
        shapes = council.gather(None if parameter is None else (tuple(parameter.shape), parameter.dtype, parameter.device.type))
        holders = [rank for rank, shape in enumerate(shapes) if shape is not None]
        if len({shapes[rank] for rank in holders}) != 1:
            raise InputError(
                f"tie: ranks {holders} hold copies of shapes {[list(shapes[rank][0]) for rank in holders]}: they must be alike"
            )
        self._group = dist.new_group(holders, backend="nccl" if shapes[holders[0]][2] == "cuda" else "gloo")
        self._parameter = parameter if len(holders) > 1 else None
        self._before: Tensor | None = None
        if self._parameter is not None:
            dist.broadcast(self._parameter.data, holders[0], group=self._group)

    def start_step(self) -> None:
        """Sets aside what earlier steps added: only the step's own gradient is summed over the copies."""
        if self._parameter is not None:
            self._before, self._parameter.grad = self._parameter.grad, None

    @torch.no_grad()
    def end_step(self) -> None:
        if self._parameter is None:
            return
        grad = torch.zeros_like(self._parameter) if self._parameter.grad is None else self._parameter.grad
        dist.all_reduce(grad, group=self._group)
        self._parameter.grad = grad if self._before is None else self._before.add_(grad)
        self._before = None
