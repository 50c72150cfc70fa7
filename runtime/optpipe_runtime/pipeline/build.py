"""From the arguments of `Pipeline` to what one rank has. Each rank checks its own before anything is made, then all
together what must be equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from optpipe.errors import InputError
from optpipe_runtime.execute.gradients import GradientMeans, Reductions, require_windows
from optpipe_runtime.execute.messages import Messages
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.memory import pci
from optpipe_runtime.memory.host_memory import HostPool
from optpipe_runtime.memory.link import Link, channel_tokens, require_queues
from optpipe_runtime.ranks.cpu_group import CpuGroup
from optpipe_runtime.ranks.grid import require_inner
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.ranks.replicas import Replicas
from optpipe_runtime.ranks.team import Team
from optpipe_runtime.stage.io import LossFn
from optpipe_runtime.stage.levels import Level, Policy, as_levels
from optpipe_runtime.stage.runner import StageRunner
from optpipe_runtime.torch_private.tensors import compiled_call


@dataclass(frozen=True, kw_only=True)
class Options:
    """Arguments of `Pipeline`; features have the others."""

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
    whole_gradients: int | None = None
    group: dist.ProcessGroup | None = None
    inner: dist.ProcessGroup | DeviceMesh | None = None
    recompute: Sequence[str | Policy] = ("full",)
    scale_grads: bool = True


def make_rank(options: Options) -> Rank:
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
    return Rank(
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


def _check(options: Options, team: Team) -> tuple[Layout, torch.device | None, Replicas, Mapping[str, Level]]:
    """This rank's arguments, alone; no device on a rank without parameters. Raises `InputError`."""
    require_valid_arguments(options, team.number, team.size)
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
    devices = {tensor.device for module in options.stages.values() for tensor in module.parameters()}
    if len(devices) > 1:
        raise InputError(f"stages are on {sorted(map(str, devices))}: a rank's stages must be on one device")
    return layout, next(iter(devices), None), replicas, as_levels(options.recompute)


def require_valid_arguments(options: Options, rank: int, ranks: int) -> None:
    """Raises `InputError` for the first argument that is wrong on this one of so many ranks."""
    stages, placement, microbatches = options.stages, options.placement, options.microbatches
    if not isinstance(microbatches, int) or microbatches < 1:
        raise InputError(f"microbatches = {microbatches!r}: must be an integer, at least 1")
    if not isinstance(placement, Sequence) or not placement:
        raise InputError(f"placement = {placement!r}: must be a sequence that names the rank of each stage")
    for s, owner in enumerate(placement):
        if not isinstance(owner, int) or not 0 <= owner < ranks:
            raise InputError(f"placement[{s}] = {owner!r}: there are {ranks} ranks, numbered from 0")
    if isinstance(options.links, str) and options.links != "auto":
        raise InputError(f'links = {options.links!r}: must be "auto", or the link of each of {ranks} ranks')
    links = None if options.links == "auto" else options.links
    for name, entries in {"peers": options.peers, "links": links}.items():
        if entries is not None and len(entries) != ranks:
            raise InputError(f"{name} has {len(entries)} entries: there are {ranks} ranks, one entry each")
    if not isinstance(stages, Mapping) or not all(isinstance(module, nn.Module) for module in stages.values()):
        raise InputError("stages must map the number of each stage on this rank to its torch.nn.Module")
    placed = {s for s, owner in enumerate(placement) if owner == rank}
    if set(stages) != placed:
        raise InputError(f"stages has {sorted(stages)} on rank {rank}: placement puts {sorted(placed)} there")
    require_bytes("host_memory_bytes", options.host_memory_bytes)


def require_bytes(name: str, value: int | None) -> None:
    if value is not None and (not isinstance(value, int) or value < 0):
        raise InputError(f"{name} = {value!r}: must be an integer, at least 0")


def compute_device(device: torch.device | None, kinds: Sequence[str | None]) -> torch.device:
    """The device of this rank, from the kinds of all ranks. Without parameters it takes the others' kind."""
    used = sorted({kind for kind in kinds if kind is not None})
    if len(used) > 1:
        raise InputError(
            f"stages are on {' and '.join(used)}, by rank {list(kinds)}: all ranks must compute on the same kind of "
            "device"
        )
    if device is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device()) if used == ["cuda"] else torch.device("cpu")


def require_no_cuda_graphs(stages: Mapping[int, nn.Module], device: torch.device) -> None:
    """Raises `InputError` if a stage has parts that run as CUDA graphs. Their saved tensors are at fixed addresses,
    in memory of the graph: freeing one frees nothing, and a reload would put it elsewhere."""
    for s, module in stages.items() if device.type == "cuda" else ():
        for name, part in module.named_modules():
            if how := _captured(part):
                raise InputError(
                    f"stage {s}: {name or 'the module'} {how}: what a CUDA graph saves cannot be freed or offloaded; "
                    "compile with mode 'default' or 'max-autotune-no-cudagraphs'"
                )


def _captured(part: nn.Module) -> str:
    """By what a module runs as a CUDA graph; empty if it does not."""
    forward = vars(part).get("forward")  # where it was replaced
    if getattr(forward, "__module__", "") == torch.cuda.graphs.__name__:
        return "was given to torch.cuda.make_graphed_callables"
    for compiled in (compiled_call(part), forward):  # by `compile` in place, by torch.compile
        config = getattr(compiled, "get_compiler_config", lambda: None)()
        if config and config.get("triton.cudagraphs"):
            return "is compiled with triton.cudagraphs, which modes 'reduce-overhead' and 'max-autotune' set"
    return ""
