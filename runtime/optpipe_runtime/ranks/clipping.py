"""Gradient clipping over all stages: the norm of the whole model's gradient, every parameter counted once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from optpipe_runtime.ranks.cpu_group import CpuGroup


def clip(
    parameters: Iterable[nn.Parameter],
    uncounted: Iterable[nn.Parameter],
    cpu_group: CpuGroup,
    max_norm: float,
    norm_type: float,
) -> float:
    """Collective: scales this rank's gradients so that the norm over all ranks is at most `max_norm`.

    `uncounted` are tied copies that another rank counts. A sharded gradient (DTensor) counts once, over all its ranks.
    As in `torch.nn.utils.clip_grad_norm_`, a gradient that is not finite makes all gradients NaN.

    Returns the norm before clipping.
    """
    everything = list(parameters)
    total = total_norm(cpu_group.gather(own_norm(everything, uncounted, norm_type)), norm_type)
    scale(everything, total, max_norm)
    return float(total)


def own_norm(parameters: Iterable[nn.Parameter], uncounted: Iterable[nn.Parameter], norm_type: float = 2.0) -> float:
    """The norm of this rank's gradients, without those that another rank counts."""
    elsewhere = set(map(id, uncounted))
    kinds = _kinds([parameter for parameter in _trained(parameters) if id(parameter) not in elsewhere])
    norms = [norm_of(kind, norm_type) for kind in kinds]
    return norms[0] if len(norms) == 1 else float(total_norm(norms, norm_type))


def total_norm(norms: Sequence[float], norm_type: float = 2.0) -> Tensor:
    """The norm of the whole, from those of its parts."""
    total: Tensor = torch.linalg.vector_norm(torch.tensor(norms or [0.0], dtype=torch.float64), norm_type)
    return total


def scale(parameters: Iterable[nn.Parameter], total: Tensor, max_norm: float) -> None:
    """Clips the gradients, given the norm of all of the whole model."""
    for kind in _kinds(_trained(parameters)):
        double = any(parameter.dtype == torch.float64 for parameter in kind)
        clip_grads_with_norm_(kind, max_norm, total if double else total.to(torch.float32))


def exceeds(total: Tensor, max_norm: float) -> bool:
    """Whether `scale` would change a gradient: torch adds a little to the norm."""
    return any(float(max_norm / (norm + 1e-6)) < 1 for norm in (total, total.to(torch.float32)))


def _trained(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those with a gradient, each once."""
    return [parameter for parameter in dict.fromkeys(parameters) if parameter.grad is not None]


def norm_of(parameters: list[nn.Parameter], norm_type: float) -> float:
    """The norm of the gradients of parameters that `_kinds` puts together."""
    norm: Tensor = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None], norm_type)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _kinds(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Plain parameters, and those of each device mesh: torch's norm functions take one kind at a time."""
    kinds: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(kinds.values())
