"""`Options`: the arguments of `Pipeline`, as one record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from optpipe_runtime.stage.io import LossFn
from optpipe_runtime.stage.levels import Policy

# Makes the optimizer of a stage from its parameters on the host, with their names.
Factory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Options:
    """See `Pipeline`."""

    stages: Mapping[int, nn.Module]
    placement: Sequence[int]
    loss_fn: LossFn
    microbatches: int
    host_memory_bytes: int | None = None
    full_duplex: bool | None = None
    routes: Sequence[Sequence[int]] | None = None
    microbatch_routes: Sequence[int] | None = None
    peers: Sequence[int | None] | None = None
    links: Sequence[str | None] | Literal["auto"] | None = None
    host_optimizers: Mapping[int, Factory] | None = None
    clip_host_updates: bool = False
    whole_gradients: int | None = None
    group: dist.ProcessGroup | None = None
    inner: dist.ProcessGroup | DeviceMesh | None = None
    recompute: Sequence[str | Policy] = ("full",)
    scale_grads: bool = True
