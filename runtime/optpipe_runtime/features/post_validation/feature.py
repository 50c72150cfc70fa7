"""`PostValidations`: the optimizers of one rank whose steps are validated later, and `PostValidation`, one of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import torch

from optpipe.errors import InputError
from optpipe_runtime.execute.handler import Feature
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.features.post_validation.update import (
    Gradients,
    Update,
    hide,
    options_of,
    parameters_of,
    restore,
    set_options,
)
from optpipe_runtime.ranks.clipping import Counted, exceeds, own_norm, scale
from optpipe_runtime.ranks.cpu_group import CpuGroup
from optpipe_runtime.ranks.team import Team

log = logging.getLogger("optpipe.runtime")

# After an update that was taken back, so many in a row must need no clipping before the next goes ahead of its norm. A
# step that is run twice costs a makespan, one that waits costs the makespan less the span: about a tenth of that.
CALM = 10


class PostValidations(Feature):
    """The optimizers of this rank whose steps are validated later."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._validations: list[PostValidation] = []

    def add(self, optimizer: torch.optim.Optimizer, max_norm: float | None, counted: Callable[[], Counted]) -> None:
        """As `Pipeline.post_validate`."""
        rank = self._rank
        rank.cpu_group.on_each_rank(lambda: _require_valid(optimizer, max_norm))
        rank.cpu_group.require_equal(max_norm=max_norm)
        for why in (feature.irreversible for feature in rank.features if feature.irreversible):
            raise InputError(
                f"post_validate: {why}, so the ranks meet before each step and gain nothing by updates ahead of the "
                "norm: use clip_grad_norm_"
            )
        self._validations.append(PostValidation(optimizer, max_norm, rank.team, rank.cpu_group, counted))

    @property
    def may_correct(self) -> bool:
        return bool(self._validations)

    def is_wrong(self) -> bool:
        return any(validation.is_wrong() for validation in self._validations)

    def correct(self) -> bool:
        self.synchronize()
        wrong = any(validation.taken_back for validation in self._validations)
        for validation in self._validations:
            validation.taken_back = False
        return wrong

    def report_fields(self) -> Mapping[str, Any]:
        return {"grad_norm": self._validations[-1].norm} if self._validations else {}

    def synchronize(self) -> None:
        for validation in self._validations:
            validation.settle()

    def close(self) -> None:
        """The optimizers are again as any other."""
        for validation in self._validations:
            validation.unhook()
        if self._rank.team.failure is None:
            self.synchronize()


def _require_valid(optimizer: object, max_norm: float | None) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"post_validate was given a {type(optimizer).__name__}: must be a torch.optim.Optimizer")
    if max_norm is not None and not max_norm > 0:
        raise InputError(f"max_norm = {max_norm}: must be more than 0, or None to clip nothing")


class PostValidation:
    """One optimizer of this rank, and its counterparts on the other ranks. It acts by hooks of the optimizer, whose
    `step` the user calls on all ranks. Without a `max_norm` updates are only checked for numbers that are not
    finite."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float | None,
        team: Team,
        cpu_group: CpuGroup,
        counted: Callable[[], Counted],
    ) -> None:
        self._optimizer, self._max_norm = optimizer, max_norm
        self._team, self._cpu_group, self._counted = team, cpu_group, counted
        self.norm: float | None = None  # at the last update for which it is known
        self.taken_back = False  # whether an update was taken back after which other ranks may have begun a step
        self._count = 0  # of updates
        self._pending: Update | None = None
        self._waiting = 0  # so many updates in a row must still need no clipping
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
        return self.taken_back or (self._pending is not None and not self._fine(self._pending))

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
            self._waiting, self.taken_back = CALM, True
            self._tell("it is taken back" + (", and made again, clipped" if isfinite(pending.norm) else ""))
            self._correct(pending)

    def unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before_update(self, optimizer: torch.optim.Optimizer, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._repeating:
            return
        if any(argument is not None for argument in (*given[1:], *named.values())):
            raise InputError(
                "post_validate: optimizer.step was given a closure or a scale, and takes neither; with a loss scaler, "
                "use clip_grad_norm_"
            )
        self.settle()
        with self._team.collective():
            self.taken_back = False  # no rank has begun a step since
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
                    self._tell("it is skipped")
                    self._hidden = hide(optimizer)

    def _after_update(self, *_: object) -> None:
        if self._pending is not None and not self._repeating:
            self._pending.options_after = options_of(self._optimizer)
        restore(self._hidden)
        self._hidden = []

    def _fine(self, update: Update) -> bool:
        self.norm = update.norm
        return isfinite(update.norm) and (self._max_norm is None or not exceeds(update.total, self._max_norm))

    def _correct(self, update: Update) -> None:
        options_now, gradients_now = options_of(self._optimizer), hide(self._optimizer)
        update.undo(self._optimizer)
        if isfinite(update.norm):
            assert self._max_norm is not None
            restore(update.gradients)
            scale(parameters_of(self._optimizer), update.total, self._max_norm)
            self._repeating = True
            try:
                self._optimizer.step()
            finally:
                self._repeating = False
        # What a scheduler of learning rates has changed since the update stays as it is.
        set_options(self._optimizer, options_now, unless=update.options_after)
        restore(gradients_now)

    def _tell(self, what: str) -> None:
        if self._cpu_group.rank == 0:
            log.warning("update %d: the norm of all gradients is %g, so %s", self._count, self.norm, what)
