"""Tied parameters: copies of one parameter on several ranks. Examples are an embedding in the first stage that is also
the head in the last, or a stage that serves both directions of a bidirectional pipeline."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from optpipe.errors import InputError
from optpipe_runtime.ranks.cpu_group import CpuGroup
from optpipe_runtime.ranks.parts import local, placed
from optpipe_runtime.ranks.team import Team


class Tie:
    """Copies that start equal and get the sum of their gradients after every step, so that equal optimizers keep them
    equal. Every method is collective.

    A module is tied by its parameters, in their order. DTensors, which must be sharded in the same way on all copies,
    are tied part by part: `fully_shard`'s on each replica, others on each inner peer. `uncounted` are the parameters
    here that a lower rank has, too: the norm of all gradients counts them there.
    """

    def __init__(self, copy: nn.Parameter | nn.Module | None, cpu_group: CpuGroup, team: Team) -> None:
        tied = list(copy.parameters()) if isinstance(copy, nn.Module) else [] if copy is None else [copy]
        alike = [(tuple(p.shape), p.dtype, p.requires_grad, str(getattr(p, "placements", ""))) for p in tied]
        kind = "cuda" if any(parameter.is_cuda for parameter in tied) else "cpu"
        answers = cpu_group.gather_by_peer(None if copy is None else (alike, kind))[team.peer]
        holders = [rank for rank, answer in enumerate(answers) if answer is not None]
        if not holders:
            raise InputError("tie: every rank passed None, so there is nothing to tie")
        for rank in holders[1:]:
            if answers[rank][0] != answers[holders[0]][0]:
                shapes = [[list(shape) for shape, *_ in answers[r][0]] for r in (holders[0], rank)]
                raise InputError(
                    f"tie: ranks {holders[0]} and {rank} hold copies of shapes {shapes[0]} and {shapes[1]}: they "
                    "must be alike, in type, in what is trained and in how they are sharded, too"
                )
        self.uncounted = tied if team.number in holders[1:] else []
        self._trained: list[nn.Parameter] = []
        self._before: list[Tensor | None] = []
        if len(holders) > 1:
            self._group = team.subgroup(holders, torch.device(answers[holders[0]][1]))
            self._trained = [parameter for parameter in tied if parameter.requires_grad]
            for parameter in tied:
                self._group.broadcast(local(parameter.data), holders[0])

    def start_step(self) -> None:
        """Sets the gradients of earlier steps aside: only this step's are summed over the copies. They are cloned,
        because DistributedDataParallel writes this step's gradients into its buckets, where the earlier ones may be."""
        self._before = [None if parameter.grad is None else parameter.grad.clone() for parameter in self._trained]
        for parameter in self._trained:
            parameter.grad = None

    @torch.no_grad()
    def end_step(self) -> None:
        grads = [placed(parameter) for parameter in self._trained]
        for reduction in [self._group.all_reduce(local(grad)) for grad in grads]:
            reduction.wait()
        for parameter, grad, before in zip(self._trained, grads, self._before, strict=True):
            parameter.grad = grad if before is None else grad.add_(before)
        self._before = []
