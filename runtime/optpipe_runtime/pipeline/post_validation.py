"""`PostValidation`: optimizer steps that do not wait for the norm of all gradients (OptPipe, section 4.3; Zero
Bubble, Qi et al. 2023, section 4).

The ranks exchange the norms of their parts while the next step runs (`Pipeline.post_validate`). At its end these have
long arrived, and every rank computes the same norm of the whole.

Zero Bubble computes the way back; an update in floating point cannot be computed back to the bit. So parameters,
gradients and optimizer state are copied before each update that is ahead of its norm, and kept until the norm is there.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from copy import deepcopy
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from optpipe.errors import InputError
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.ranks.cpu_group import CpuGroup
from optpipe_runtime.ranks.gradients import Counted, exceeds, own_norm, scale, total_norm

log = logging.getLogger("optpipe.runtime")

# After an update that was taken back: how many in a row must need no clipping before the next goes ahead of its norm.
# A step that is run twice costs a makespan, one that waits costs the makespan less the span: about a tenth of that.
CALM = 10


class PostValidation:
    """One optimizer of this rank, and its counterparts on the other ranks. It acts by hooks of the optimizer, whose
    `step` the user calls on all ranks. Without a `max_norm` updates are only checked for numbers that are not
    finite. Making one is collective: raises `InputError` if an argument is wrong."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None, rank: Rank, counted: Callable[[], Counted]
    ) -> None:
        def require_valid() -> None:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise InputError(
                    f"post_validate was given a {type(optimizer).__name__}: must be a torch.optim.Optimizer"
                )
            if max_norm is not None and not max_norm > 0:
                raise InputError(f"max_norm = {max_norm}: must be more than 0, or None to clip nothing")

        rank.cpu_group.on_each_rank(require_valid)
        rank.cpu_group.require_equal(max_norm=max_norm)
        self._optimizer, self._max_norm = optimizer, max_norm
        self._team, self._cpu_group, self._counted = rank.team, rank.cpu_group, counted
        self.norm: float | None = None  # at the last update whose norm has arrived
        self._taken_back = False  # whether an update was taken back after which other ranks may have begun a step
        self._count = 0  # of updates
        self._pending: Update | None = None
        self._waiting = 0  # the number of updates in a row that must still need no clipping
        self._hidden: Gradients = []  # of an update that is skipped, while it is
        self._repeating = False
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_update),
            optimizer.register_step_post_hook(self._after_update),
            optimizer.register_state_dict_pre_hook(lambda _: self.settle()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.settle()),
        ]

    def is_wrong(self) -> bool:
        """Whether the last update was not the right one, for a step that has been run since. Waits for the norm."""
        return self._taken_back or (self._pending is not None and not self._fine(self._pending))

    def settle(self) -> None:
        """Waits for the norm of the last update, and corrects the update if it was not the right one. Not a collective:
        any rank may call it when all have called `optimizer.step`."""
        with self._team.collective():
            pending, self._pending = self._pending, None
            if pending is None:
                return
            if self._fine(pending):
                self._waiting = max(0, self._waiting - 1)
                return
            self._waiting, self._taken_back = CALM, True
            self._log("it is taken back" + (", and made again, clipped" if isfinite(pending.norm) else ""))
            options_now, gradients_now = options_of(self._optimizer), hide(self._optimizer)
            pending.undo(self._optimizer)
            if isfinite(pending.norm):
                assert self._max_norm is not None
                restore(pending.gradients)
                scale(parameters_of(self._optimizer), pending.total, self._max_norm)
                self._repeating = True
                try:
                    self._optimizer.step()
                finally:
                    self._repeating = False
            # What a scheduler of learning rates has changed since the update stays as it is.
            set_options(self._optimizer, options_now, unless=pending.options_after)
            restore(gradients_now)

    def correct(self) -> bool:
        """Settles. Returns whether an update was taken back since the last call."""
        self.settle()
        taken_back, self._taken_back = self._taken_back, False
        return taken_back

    def close(self) -> None:
        """The optimizer is again as any other."""
        for hook in self._hooks:
            hook.remove()
        if self._team.failure is None:
            self.settle()

    def _before_update(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._repeating:
            return
        if any(argument is not None for argument in (*args[1:], *kwargs.values())):
            raise InputError(
                "post_validate: optimizer.step was given a closure or a scale, and takes neither; with a loss scaler, "
                "use clip_grad_norm_"
            )
        self.settle()
        with self._team.collective():
            self._taken_back = False  # no rank has begun a step since
            self._count += 1
            if self._cpu_group.peers > 1:  # they need each other for their norms: all must be here
                self._cpu_group.share(method="optimizer.step").least(0)
            norm = own_norm(*self._counted(), self._cpu_group)
            update = Update(self._cpu_group, norm)
            if not self._waiting:
                update.save(optimizer)
                self._pending = update
            elif self._fine(update):
                self._waiting -= 1
            else:
                self._waiting = CALM
                if isfinite(update.norm):
                    assert self._max_norm is not None
                    scale(parameters_of(optimizer), update.total, self._max_norm)
                else:
                    self._log("it is skipped")
                    self._hidden = hide(optimizer)

    def _after_update(self, *_: object) -> None:
        if self._pending is not None and not self._repeating:
            self._pending.options_after = options_of(self._optimizer)
        restore(self._hidden)
        self._hidden = []

    def _fine(self, update: Update) -> bool:
        self.norm = update.norm
        return isfinite(update.norm) and (self._max_norm is None or not exceeds(update.total, self._max_norm))

    def _log(self, what: str) -> None:
        if self._cpu_group.rank == 0:
            log.warning("update %d: the norm of all gradients is %g, so %s", self._count, self.norm, what)


Gradients = list[tuple[nn.Parameter, Tensor | None]]


class Update:
    """One update: the norms of all ranks, and what it takes to undo it and to make it again. `norm`, of this rank's
    part, is sent to the others, without waiting."""

    def __init__(self, cpu_group: CpuGroup, norm: float) -> None:
        self._norms = cpu_group.share(*struct.unpack("<q", struct.pack("<d", norm)), method="optimizer.step")
        self.gradients: Gradients = []
        self._parameters: list[tuple[nn.Parameter, Tensor]] = []
        self._state: dict[Any, Any] = {}
        self._options: list[dict[str, Any]] = []
        self.options_after: list[dict[str, Any]] = []

    @property
    def total(self) -> Tensor:
        """The norm of all gradients. Waits for those of all ranks."""
        return total_norm([struct.unpack("<d", struct.pack("<q", row[0]))[0] for row in self._norms.rows])

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
