"""Makes what one rank of a pipeline has, from the arguments of `Pipeline`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from optpipe.errors import InputError
from optpipe_runtime.arguments import (
    both_ways,
    compute_device,
    device_of,
    require_bytes,
    require_equal,
    require_no_cuda_graphs,
    require_valid_arguments,
    require_whole_gradients,
)
from optpipe_runtime.execute.host_optimizer import Factory, on_host
from optpipe_runtime.execute.messages import Messages
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.memory.host_pool import HostPool
from optpipe_runtime.memory.link import Link
from optpipe_runtime.memory.peers import Peers
from optpipe_runtime.memory.shared_link import channel_tokens, require_queues
from optpipe_runtime.ranks.cpu_group import CpuGroup
from optpipe_runtime.ranks.inner import require_inner
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.ranks.replicas import Replicas
from optpipe_runtime.ranks.team import Team
from optpipe_runtime.stage.io import LossFn
from optpipe_runtime.stage.runner import StageRunner

# placement, microbatches, routes, microbatch_routes, peers, links, full_duplex: the arguments of `Layout.make`
LayoutArguments = tuple[Sequence[int], int, Any, Any, Sequence[Any] | None, Sequence[Any] | None, bool | None]


def build(
    stages: Mapping[int, nn.Module],
    layout_arguments: LayoutArguments,
    loss_fn: LossFn,
    host_memory_bytes: int | None,
    host_optimizers: Mapping[int, Factory] | None,
    clip_host_updates: bool,
    whole_gradients: int | None,
    groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | DeviceMesh | None],
) -> Rank:
    """Collective. `groups` are those of the pipeline and of the inner peers. Raises `InputError` for arguments that are
    wrong or do not fit together, on every rank."""
    if not dist.is_initialized():
        raise InputError("Pipeline needs torch.distributed.init_process_group first; start the script with torchrun")
    placement, microbatches, *_, peers, links, full_duplex = layout_arguments
    team = Team(*groups)
    cpu_group = CpuGroup(team)

    def checked() -> tuple[Layout, torch.device | None, Replicas]:
        require_valid_arguments(
            stages, placement, microbatches, {"peers": peers, "links": links}, team.number, team.size
        )
        require_bytes("host_memory_bytes", host_memory_bytes)
        layout = Layout.make(*layout_arguments[:-1], bool(full_duplex))
        if not callable(loss_fn) and not layout.last.isdisjoint(stages):
            raise InputError(f"loss_fn = {loss_fn!r}: must be a function of the last stage's output and the targets")
        replicas = Replicas(stages, layout, team)
        require_whole_gradients(whole_gradients)
        if whole_gradients is not None:
            replicas.require_windows(whole_gradients)
        for s, module in replicas.modules.items():
            require_inner(s, module, team.inner, replicas.ranks(s))
        return layout, device_of(stages), replicas

    layout, own_device, replicas = cpu_group.on_each_rank(checked)
    device = compute_device(own_device, cpu_group.gather(own_device and own_device.type))
    layout = replace(layout, full_duplex=both_ways(full_duplex, device))
    cpu_group.on_each_rank(lambda: require_queues(layout, team.number, device))
    cpu_group.on_each_rank(lambda: require_no_cuda_graphs(stages, device))
    options = {"clip_host_updates": clip_host_updates, "whole_gradients": whole_gradients}
    require_equal(cpu_group, microbatches=microbatches, **options, **asdict(layout))
    link = Link(device, layout.full_duplex, channel_tokens(team, layout, device))
    pool = HostPool(device, host_memory_bytes)
    loss = loss_fn, 1 / microbatches
    runners = {
        s: StageRunner(s, module, device, link, pool, loss if s in layout.last else None)
        for s, module in replicas.modules.items()
    }
    messages, all_peers = Messages(team, layout, device), Peers(team, layout, device)
    optimizers = cpu_group.on_each_rank(
        lambda: on_host(
            host_optimizers or {}, replicas.modules, layout, team.require_alive, link, device, clip_host_updates
        )
    )
    parts = team, layout, device, runners, replicas, cpu_group, messages, pool, link, all_peers, optimizers
    return Rank(*parts, whole_gradients=whole_gradients)
