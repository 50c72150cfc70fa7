"""`Replay`: runs a stage's forward again as it ran the first time, and undoes what a step has changed in its module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from optpipe_runtime.stage.state import Restore, State, save_random

# A context in which all that forwards change is as it was at some forward; its value are the tensors that stand in.
AsFirst = Callable[[], AbstractContextManager[list[Tensor]]]


class Replay:
    """Random numbers, gradients and what else forwards change, of one stage."""

    def __init__(
        self,
        modules: Callable[[], Iterable[nn.Module]],
        parameters: Callable[[], Iterable[nn.Parameter]],
        device: torch.device,
    ) -> None:
        self._state, self._parameters, self._device = State(modules), parameters, device

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """What runs in this context leaves all but gradients as it was."""
        saved, restore_random = self._state.save(), save_random(self._device)
        try:
            yield
        finally:
            saved.restore()
            restore_random()

    def as_now(self) -> AsFirst:
        """Returns a context in which random numbers, buffers and attributes are what they are now. It leaves them as it
        finds them. Its value are the tensors that stand in for others meanwhile."""
        saved, restore_random = self._state.save(), save_random(self._device)

        @contextmanager
        def again() -> Iterator[list[Tensor]]:
            restore_later = save_random(self._device)
            try:
                with saved.standing_in() as stand_ins:
                    restore_random()
                    yield stand_ins
            finally:
                restore_later()

        return again

    def snapshot(self) -> Restore:
        """Saves what a step changes in the modules. Returns a function that restores it."""
        gradients = [
            (p, p.grad, None if p.grad is None else p.grad.detach().to("cpu", copy=True)) for p in self._parameters()
        ]
        saved = self._state.save()

        def restore() -> None:
            for parameter, gradient, value in gradients:
                parameter.grad = gradient
                if gradient is not None and value is not None:
                    gradient.detach().copy_(value)
            saved.restore()

        return restore

    def end_step(self) -> None:
        """Lets go of copies."""
        self._state.forget_copies()
