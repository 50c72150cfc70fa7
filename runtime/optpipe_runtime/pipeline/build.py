"""From the arguments of `Pipeline` to what runs its steps on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

import torch
import torch.distributed as dist

from optpipe.errors import InputError
from optpipe_runtime.execute.gradients import GradientMeans, Reductions, require_windows
from optpipe_runtime.execute.messages import Messages
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.features.evictions import Evictions
from optpipe_runtime.features.host_updates import HostUpdates
from optpipe_runtime.memory import pci
from optpipe_runtime.memory.host_memory import HostPool
from optpipe_runtime.memory.link import Link, channel_tokens, require_queues
from optpipe_runtime.pipeline.arguments import (
    Options,
    compute_device,
    device_of,
    require_bytes,
    require_no_cuda_graphs,
    require_valid_arguments,
)
from optpipe_runtime.pipeline.step_runner import StepRunner
from optpipe_runtime.ranks.cpu_group import CpuGroup
from optpipe_runtime.ranks.grid import require_inner
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.ranks.replicas import Replicas
from optpipe_runtime.ranks.team import Team
from optpipe_runtime.stage.levels import Level, as_levels
from optpipe_runtime.stage.runner import StageRunner


def build(options: Options) -> StepRunner:
    """Collective. Raises `InputError` for arguments that are wrong or do not fit together, on every rank."""
    if not dist.is_initialized():
        raise InputError("Pipeline needs torch.distributed.init_process_group first; start the script with torchrun")
    team = Team(options.group, options.inner)
    cpu_group = CpuGroup(team)
    layout, own_device, replicas, levels = cpu_group.on_each_rank(lambda: _check(options, team))
    device = compute_device(own_device, cpu_group.gather(own_device and own_device.type))
    # On CPU each direction would take the other's share of the memory's bandwidth.
    full_duplex = device.type == "cuda" if options.full_duplex is None else options.full_duplex
    layout = replace(layout, full_duplex=full_duplex)
    places = cpu_group.gather_by_peer(pci.place(device))
    if options.links == "auto":
        layout = replace(layout, links=pci.shared_links(places))

    def require() -> None:
        require_queues(layout, team.number, device)
        require_no_cuda_graphs(options.stages, device)
        require_windows(replicas, options.whole_gradients)

    cpu_group.on_each_rank(require)
    cpu_group.require_equal(
        microbatches=options.microbatches,
        clip_host_updates=options.clip_host_updates,
        whole_gradients=options.whole_gradients,
        scale_grads=options.scale_grads,
        recompute=list(levels),
        **asdict(layout),
    )
    link = Link(device, layout.full_duplex, channel_tokens(team, layout, device))
    pool = HostPool(device, options.host_memory_bytes)
    stages = {
        s: StageRunner(s, module, device, link, pool, options.loss_fn if s in layout.last else None)
        for s, module in replicas.modules.items()
    }
    rank = Rank(
        team=team,
        cpu_group=cpu_group,
        layout=layout,
        device=device,
        stages=stages,
        replicas=replicas,
        reductions=Reductions(replicas, cpu_group, device, options.whole_gradients),
        means=GradientMeans(stages, replicas, options.scale_grads),
        messages=Messages(team, layout, device),
        pool=pool,
        link=link,
        levels=levels,
    )
    evictions = Evictions(rank)
    host_updates = HostUpdates(rank, options.host_optimizers or {}, options.clip_host_updates)
    rank.features = [evictions, host_updates]
    return StepRunner(rank, host_updates, options.specs)


def _check(options: Options, team: Team) -> tuple[Layout, torch.device | None, Replicas, Mapping[str, Level]]:
    """This rank's arguments, alone; no device on a rank without parameters. Raises `InputError`."""
    require_valid_arguments(options, team.number, team.size)
    require_bytes("host_memory_bytes", options.host_memory_bytes)
    layout = Layout.make(
        options.placement,
        options.microbatches,
        routes=options.routes,
        microbatch_routes=options.microbatch_routes,
        peers=options.peers,
        links=None if options.links == "auto" else options.links,
        full_duplex=bool(options.full_duplex),
    )
    if not callable(options.loss_fn) and not layout.last.isdisjoint(options.stages):
        raise InputError(
            f"loss_fn = {options.loss_fn!r}: must be a function of the last stage's output and the targets"
        )
    replicas = Replicas(options.stages, layout, team)
    for s, module in replicas.modules.items():
        require_inner(s, module, team.inner, replicas.sharded[s].ranks)
    return layout, device_of(options.stages), replicas, as_levels(options.recompute)
