"""`GradientMeans`: a step's gradients become those of the mean loss.

As in torch.distributed.pipelining, each micro-batch's backward starts from its own loss, and the sum of gradients is
divided by the number of micro-batches when it is complete. So what an autograd function adds inside a backward, such as
an auxiliary loss of a mixture of experts, is averaged as the loss is. Unlike there, gradients of earlier steps stay as
they are: they are multiplied by the number before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from optpipe_runtime.lowering.plan import Plan
from optpipe_runtime.ranks.parts import local
from optpipe_runtime.ranks.replicas import Replicas
from optpipe_runtime.stage.runner import StageRunner
from optpipe_runtime.stage.split import main_grad


class GradientMeans:
    """Of one step after the other. Without `scales` gradients stay those of the sum of the losses."""

    def __init__(self, stages: Mapping[int, StageRunner], replicas: Replicas, scales: bool) -> None:
        self._stages, self._replicas, self._scales = stages, replicas, scales
        self._divisor = 1
        self._users: Counter[int] = Counter()  # by parameter, so many stages that still add to its gradient

    def start_step(self, plan: Plan) -> None:
        """Before the first op."""
        self._divisor = plan.problem.microbatches if self._scales else 1
        stages = {op.stage for op in plan.completing}
        self._users = Counter(parameter for s in stages for parameter in self._parameters(s))
        if self._divisor > 1:
            earlier = {id(tensor): tensor for s in stages for _, tensor in self._sums(s)}
            with torch.no_grad():
                for tensor in earlier.values():
                    local(tensor).mul_(self._divisor)

    def factors(self, s: int, weights: Sequence[float]) -> list[float]:
        """Collective over the replicas of a stage where routes end: by what the loss of each micro-batch is multiplied,
        so that the gradients become those of the losses' mean over all replicas, weighted so; or of their weighted sum
        here, without `scales`."""
        if not self._scales:
            return list(weights)
        total, replicas = self._replicas.total(s, sum(weights))
        return [weight * len(weights) * replicas / total for weight in weights]

    def complete(self, s: int) -> None:
        """After the last W of a stage: divides the sums to which no other stage adds."""
        self._users.subtract(self._parameters(s))
        self._divide(tensor for parameter, tensor in self._sums(s) if not self._users[parameter])

    def end_window(self, s: int) -> None:
        """Divides what is about to be reduced of a stage that is reduced several times a step."""
        self._divide(tensor for _, tensor in self._replicas.whole_gradients(s))

    @torch.no_grad()
    def _divide(self, sums: Iterable[Tensor]) -> None:
        if self._divisor > 1:
            for tensor in sums:
                local(tensor).div_(self._divisor)

    def _parameters(self, s: int) -> set[int]:
        """The identities of a stage's parameters, of sharded ones those of the shards."""
        plain = self._replicas.unsharded(s, self._stages[s].parameters())
        return {id(parameter) for parameter in (*plain, *self._replicas.shards(s))}

    def _sums(self, s: int) -> Iterator[tuple[int, Tensor]]:
        """What backwards of a stage add to, by parameter. Gradients of shards are means already."""
        for parameter in self._replicas.unsharded(s, self._stages[s].parameters()):
            for tensor in (parameter.grad, main_grad(parameter)):
                if tensor is not None:
                    yield id(parameter), tensor
        yield from self._replicas.whole_gradients(s)
