"""What a `Pipeline` is given, checked: before anything is made, each rank what it has, and all together what must be
the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from optpipe.errors import InputError
from optpipe_runtime.ranks.agreement import Council


def require_sound(
    stages: Mapping[int, nn.Module],
    placement: Sequence[int],
    microbatches: int,
    by_rank: Mapping[str, Sequence[Any] | None],
    rank: int,
    ranks: int,
) -> None:
    if not isinstance(microbatches, int) or microbatches < 1:
        raise InputError(f"microbatches = {microbatches!r}: must be an integer, at least 1")
    if not isinstance(placement, Sequence) or not placement:
        raise InputError(f"placement = {placement!r}: must be a sequence that names the rank of each stage")
    for s, owner in enumerate(placement):
        if not isinstance(owner, int) or not 0 <= owner < ranks:
            raise InputError(f"placement[{s}] = {owner!r}: there are {ranks} ranks, numbered from 0")
    for name, entries in by_rank.items():
        if entries is not None and len(entries) != ranks:
            raise InputError(f"{name} has {len(entries)} entries: there are {ranks} ranks, one entry each")
    if not isinstance(stages, Mapping) or not all(isinstance(module, nn.Module) for module in stages.values()):
        raise InputError("stages must map the number of each stage on this rank to its torch.nn.Module")
    own = {s for s, owner in enumerate(placement) if owner == rank}
    if set(stages) != own:
        raise InputError(f"stages has {sorted(stages)} on rank {rank}: placement puts {sorted(own)} there")


def require_bytes(name: str, given: int | None) -> None:
    if given is not None and (not isinstance(given, int) or given < 0):
        raise InputError(f"{name} = {given!r}: must be an integer, at least 0")


def require_alike(council: Council, **given: Any) -> None:
    """Collective: what every rank gives the same. With another on one of them, ranks would wait for each other for
    ever."""
    told = council.gather(given)
    for rank, theirs in enumerate(told):
        for name, here in told[0].items():
            if theirs[name] != here:
                raise InputError(
                    f"{name} is {here} on rank 0 and {theirs[name]} on rank {rank}: every rank gives the same"
                )


def device_of(stages: Mapping[int, nn.Module]) -> torch.device | None:
    """Where the stages' parameters are; None where there are none."""
    devices = {tensor.device for module in stages.values() for tensor in module.parameters()}
    if len(devices) > 1:
        raise InputError(f"stages are on {sorted(map(str, devices))}: a rank's stages are on one device")
    return devices.pop() if devices else None


def one_kind(own: torch.device | None, kinds: Sequence[str | None]) -> torch.device:
    """This rank's device, `kinds` being those of all ranks: one without parameters computes on what the others have."""
    used = sorted({kind for kind in kinds if kind is not None})
    if len(used) > 1:
        raise InputError(
            f"stages are on {' and '.join(used)}, by rank {list(kinds)}: all ranks compute on the same kind of device"
        )
    if own is not None:
        return own
    return torch.device("cuda", torch.cuda.current_device()) if used == ["cuda"] else torch.device("cpu")
