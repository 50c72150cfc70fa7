"""`activation_budget_bytes` of a GPU: what is free, less what else a step allocates."""

from __future__ import annotations

import torch
from torch import nn

from optpipe.errors import InputError
from optpipe_runtime.execute.messages import messages_reserve
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.ranks.parts import local
from optpipe_runtime.stage.split import main_grad

Sizes = dict[nn.Parameter, int]  # bytes of gradients


def gradients_now(rank: Rank) -> Sizes:
    """What the gradients take that backwards have left, which may be less spread over inner peers than their parameters
    are. Those of gathered parameters are noted where these are (`Sharded.gradient_bytes`)."""
    rank.replicas.held_bytes()
    parameters = [parameter for stage in rank.stages.values() for parameter in stage.parameters()]
    return {p: _gradient_bytes(p) for p in parameters if p.grad is not None and not p.grad.is_sparse}


def _gradient_bytes(parameter: nn.Parameter) -> int:
    """What its gradient takes. That of a sparse one depends on the batch, so it counts as if it was still to come."""
    gradient = parameter.grad
    return 0 if gradient is None or gradient.is_sparse else local(gradient).untyped_storage().nbytes()


def require_budget(rank: Rank) -> None:
    """Raises `InputError` on CPU, which has no `budget`."""
    if rank.device.type != "cuda":
        raise InputError("activation_budget_bytes is missing: how many bytes of activations may this rank hold?")


def budget(rank: Rank, gradients: Sizes) -> int:
    """The free memory of a GPU, less what else a step allocates: gradients, as large as they were found to be, casts of
    weights, copies of buffers, and messages; less a tenth for workspace."""
    free, _ = torch.cuda.mem_get_info(rank.device)
    cached = torch.cuda.memory_reserved(rank.device) - torch.cuda.memory_allocated(rank.device)
    still_to_come = messages_reserve(rank.number, rank.layout, rank.io)
    for s, stage in rank.stages.items():
        still_to_come += stage.split.cast_bytes + stage.buffer_bytes + rank.replicas.gradient_bytes(s)
        for parameter in (*rank.replicas.parameters(s), *stage.outside.named_parameters().values()):
            if parameter.requires_grad and main_grad(parameter) is None:  # whose buffer is there
                still_to_come += max(0, gradients.get(parameter, local(parameter).nbytes) - _gradient_bytes(parameter))
    return max(0, int(0.9 * (free + cached - still_to_come)))
