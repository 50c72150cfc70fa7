"""Tied parameters: copies on several ranks, such as an embedding in the first stage that is the head in the last, or a
stage that serves both directions of a bidirectional pipeline."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from optpipe.errors import InputError
from optpipe_runtime.ranks.agreement import Council
from optpipe_runtime.ranks.team import Team


class Tie:
    """Copies that start equal and get the sum of their gradients after every step, so that equal optimizers keep them
    equal. Collective.

    A module is tied by its parameters, in their order. Those of fully_shard, alike on all copies, are tied shard by
    shard; `uncounted` are the parameters here that are copies of a lower rank's.
    """

    def __init__(self, copy: nn.Parameter | nn.Module | None, council: Council, team: Team) -> None:
        tied = list(copy.parameters()) if isinstance(copy, nn.Module) else [] if copy is None else [copy]
        alike = [(tuple(parameter.shape), parameter.dtype, parameter.requires_grad) for parameter in tied]
        told = council.gather(
            None if copy is None else (alike, "cuda" if any(parameter.is_cuda for parameter in tied) else "cpu")
        )
        holders = [rank for rank, answer in enumerate(told) if answer is not None]
        if not holders:
            raise InputError("tie: every rank passed None, so there is no copy to tie")
        for rank in holders[1:]:
            if told[rank][0] != told[holders[0]][0]:
                shapes = [[list(shape) for shape, *_ in told[r][0]] for r in (holders[0], rank)]
                raise InputError(
                    f"tie: ranks {holders[0]} and {rank} hold copies of shapes {shapes[0]} and {shapes[1]}: they "
                    "must be alike, "
                    "in type and in what is trained, too"
                )
        self.uncounted = tied if team.number in holders[1:] else []
        self._trained: list[nn.Parameter] = []
        self._before: list[Tensor | None] = []
        if len(holders) > 1:
            self._group = team.subgroup(holders, torch.device(told[holders[0]][1]))
            self._trained = [parameter for parameter in tied if parameter.requires_grad]
            for parameter in tied:
                self._group.spread(_local(parameter.data), holders[0])

    def start_step(self) -> None:
        """Sets aside what earlier steps added: only the step's own gradients are summed over the copies. In memory of
        its own, for DistributedDataParallel writes this step's into its buckets, where the earlier ones may be."""
        self._before = [None if parameter.grad is None else parameter.grad.clone() for parameter in self._trained]
        for parameter in self._trained:
            parameter.grad = None

    @torch.no_grad()
    def end_step(self) -> None:
        grads = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in self._trained
        ]
        for reduction in [self._group.reduce(_local(grad)) for grad in grads]:
            reduction.wait()
        for parameter, grad, before in zip(self._trained, grads, self._before, strict=True):
            parameter.grad = grad if before is None else grad.add_(before)
        self._before = []


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
