"""`Copied`: a stage in `DistributedDataParallel`, whose own forward and backward run once a step, when all gradients
are complete."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from optpipe.errors import InputError
from optpipe_runtime.ranks.sharded import require_apart
from optpipe_runtime.ranks.team import Team
from optpipe_runtime.torch_private.groups import delayed_parameters


class Copied:
    """One stage."""

    def __init__(self, s: int, wrapper: DistributedDataParallel, team: Team) -> None:
        require_apart(
            s, "DistributedDataParallel", dist.get_process_group_ranks(wrapper.process_group), team, "process_group"
        )
        delayed = delayed_parameters(wrapper)
        for option, value in {"static_graph": wrapper.static_graph, "delay_all_reduce_named_params": delayed}.items():
            if value:
                raise InputError(
                    f"stage {s}: DistributedDataParallel with {option} counts on one backward a step: leave it out"
                )
        self._stage, self._wrapper, self.group = s, wrapper, wrapper.process_group
        self._trained = {
            name: parameter for name, parameter in wrapper.module.named_parameters() if parameter.requires_grad
        }

    def complete(self) -> Tensor:
        """Runs DDP's forward. Its backward finds every gradient complete and starts the reducer."""
        wrapper = self._wrapper
        complete = [parameter for parameter in self._trained.values() if parameter.grad is not None]
        if not complete or (len(complete) < len(self._trained) and not wrapper.find_unused_parameters):
            names = [name for name, parameter in self._trained.items() if parameter.grad is None]
            raise InputError(
                f"stage {self._stage}: {names[0]} and {len(names) - 1} other parameters got no gradient in this "
                "step: make its DistributedDataParallel with find_unused_parameters=True"
            )
        module, wrapper.module = wrapper.module, _Complete(wrapper.module, complete)
        try:
            signal: Tensor = wrapper(complete[0].new_empty(0))
        finally:
            wrapper.module = module
        return signal


class _Complete(nn.Module):
    """Stands in for a module whose gradients are already there. Its buffers are the module's own, so that DDP keeps
    them equal on all replicas."""

    def __init__(self, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._module, self._parameters_with_gradient = module, parameters

    def forward(self, _: Tensor) -> Any:
        return _AddsNothing.apply(*self._parameters_with_gradient)  # type: ignore[no-untyped-call]


class _AddsNothing(torch.autograd.Function):
    """Makes a number from parameters. Its backward reaches each parameter and adds nothing to its gradient."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return (None,) * ctx.count
