"""Finds what a stage communicates with inside its ops, and refuses what the pipeline has not been told about."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from optpipe.errors import InputError
from optpipe_runtime.ranks.grid import ranks_of
from optpipe_runtime.ranks.parts import dimensions


class Told(nn.Module):
    """A stage of which the caller knows with whom its ops communicate. Its parts may hold other groups, for what runs
    between two steps."""


def require_inner(s: int, module: nn.Module, inner: Collection[int], replicas: Collection[int] = ()) -> None:
    """Raises `InputError` if a stage's ops communicate with ranks that are not its inner peers: these may run another
    schedule. DTensors may also be spread over `replicas`, by `fully_shard`, which communicates between the steps."""
    for name, ranks in () if isinstance(module, Told) else _communicating(module):
        if not ranks <= set(inner) and not ranks <= set(replicas):
            allowed = f"of which inner has {sorted(inner)}" if len(inner) > 1 else "which all must run one schedule"
            raise InputError(
                f"stage {s}: {name} communicates inside an op with ranks {sorted(ranks)}, {allowed}: give the "
                "Pipeline, as inner, the DeviceMesh or process group of all ranks that compute this stage together"
            )


def _communicating(module: nn.Module) -> Iterator[tuple[str, set[int]]]:
    """By name: each dimension over which a tensor is spread, and each group or mesh that a module holds."""
    for tensors in (module.named_parameters(), module.named_buffers()):
        for name, tensor in tensors:
            if isinstance(tensor, DTensor):
                yield from ((name, ranks) for ranks in dimensions(tensor))
    for name, part in module.named_modules():
        held = [value for value in vars(part).values() for value in _values(value)]
        if isinstance(part, nn.SyncBatchNorm) and part.process_group is None:
            held.append(dist.group.WORLD)
        for group in held:
            if isinstance(group, dist.ProcessGroup | DeviceMesh) and len(ranks := set(ranks_of(group))) > 1:
                yield name or type(part).__name__, ranks


def _values(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, tuple | list) else [value]
