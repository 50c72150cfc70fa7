"""Tensors of which each of several ranks has a part."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from optpipe_runtime.torch_private.tensors import AsyncCollectiveTensor, own_part


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor: of a DTensor its own part, of a collective under way the result. Others are what
    they are."""
    while True:
        if isinstance(tensor, DTensor):
            tensor = own_part(tensor)
        elif isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.trigger_wait()  # type: ignore[no-untyped-call]
        else:
            return tensor


def dimensions(tensor: DTensor) -> list[set[int]]:
    """For each dimension of the tensor's mesh, the ranks along it that this rank is one of."""
    mesh = tensor.device_mesh
    return [set(dist.get_process_group_ranks(mesh.get_group(dim))) for dim in range(mesh.ndim)]


def placed(parameter: Any) -> Any:
    """The parameter's gradient, zeros if it has none, spread over ranks as the parameter is: backwards may leave it in
    another way. Collective over the ranks of a DTensor whose gradient is."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return gradient.redistribute(placements=parameter.placements) if isinstance(gradient, DTensor) else gradient
