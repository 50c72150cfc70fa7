"""The arguments of `Pipeline` as one record, and checks: each rank its own before anything is made, and all together
what must be equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from optpipe.errors import InputError
from optpipe_runtime.execute.batch import ChunkSpecs
from optpipe_runtime.features.host_optimizer import Factory
from optpipe_runtime.stage.io import LossFn
from optpipe_runtime.stage.levels import Policy
from optpipe_runtime.torch_private.tensors import compiled_call


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
    specs: ChunkSpecs = field(default_factory=ChunkSpecs)


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


def require_bytes(name: str, value: int | None) -> None:
    if value is not None and (not isinstance(value, int) or value < 0):
        raise InputError(f"{name} = {value!r}: must be an integer, at least 0")


def device_of(stages: Mapping[int, nn.Module]) -> torch.device | None:
    """The device of the stages' parameters; None if they have no parameters."""
    devices = {tensor.device for module in stages.values() for tensor in module.parameters()}
    if len(devices) > 1:
        raise InputError(f"stages are on {sorted(map(str, devices))}: a rank's stages must be on one device")
    return devices.pop() if devices else None


def compute_device(device: torch.device | None, kinds: Sequence[str | None]) -> torch.device:
    """The device that this rank computes on, from the kinds of device of all ranks. A rank without parameters takes
    the kind of the others."""
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
