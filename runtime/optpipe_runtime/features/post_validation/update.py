"""`Update`: what an optimizer step changes, so that it can be taken back, to the bit, and made again."""

from __future__ import annotations

import struct
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from optpipe_runtime.ranks.clipping import total_norm
from optpipe_runtime.ranks.cpu_group import CpuGroup

Gradients = list[tuple[nn.Parameter, Tensor | None]]


class Update:
    """One update: the norms of all ranks, and what it takes to undo it and to make it again.

    Parameters
    ----------
    norm
        Of this rank's part. It is sent to the others, without waiting.
    """

    def __init__(self, cpu_group: CpuGroup, norm: float) -> None:
        self._norms = cpu_group.share(_bits(norm), method="optimizer.step")
        self.gradients: Gradients = []
        self._parameters: list[tuple[nn.Parameter, Tensor]] = []
        self._state: dict[Any, Any] = {}
        self._options: list[dict[str, Any]] = []
        self.options_after: list[dict[str, Any]] = []

    @property
    def total(self) -> Tensor:
        """The norm of all gradients. Waits for those of all ranks."""
        return total_norm([_number(row[0]) for row in self._norms.rows])

    @property
    def norm(self) -> float:
        return float(self.total)

    def save(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are copied, too: optimizers may change them, and users set them to zero in place."""
        parameters = parameters_of(optimizer)
        self.gradients = [(p, None if p.grad is None else p.grad.detach().clone()) for p in parameters]
        self._parameters = [(p, p.detach().clone()) for p in parameters if p.grad is not None]
        self._state = {key: _copied(state) for key, state in optimizer.state.items()}
        self._options = options_of(optimizer)

    @torch.no_grad()
    def undo(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, value in self._parameters:
            parameter.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(self._state)
        set_options(optimizer, self._options)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def hide(optimizer: torch.optim.Optimizer) -> Gradients:
    """Sets the gradients to None, so that the optimizer passes over their parameters. Returns them."""
    hidden: Gradients = [(parameter, parameter.grad) for parameter in parameters_of(optimizer)]
    restore([(parameter, None) for parameter, _ in hidden])
    return hidden


def restore(gradients: Gradients) -> None:
    for parameter, gradient in gradients:
        parameter.grad = gradient


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """A copy of each group's options, such as its learning rate."""
    return [{name: _copied(v) for name, v in group.items() if name != "params"} for group in optimizer.param_groups]


def set_options(
    optimizer: torch.optim.Optimizer, options: list[dict[str, Any]], unless: list[dict[str, Any]] | None = None
) -> None:
    """Sets the options that are not equal to those of `unless`. A user may have added groups since."""
    for k, (group, values) in enumerate(zip(optimizer.param_groups, options, strict=False)):
        kept = unless[k] if unless is not None and k < len(unless) else {}
        for name, value in values.items():
            if name in kept and _equal(value, kept[name]):
                continue
            if isinstance(value, Tensor) and isinstance(group[name], Tensor):
                group[name].copy_(value)  # others may hold the tensor
            else:
                group[name] = value


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return deepcopy(value)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return bool(a == b)


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
