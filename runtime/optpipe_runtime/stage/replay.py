"""`Replay`: runs a stage's forward again as it ran the first time, and undoes what a step has changed in its module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from optpipe_runtime.memory import buffers


class Replay:
    """Random numbers, buffers and gradients of one stage. `changing` are the buffers of modules that change one in a
    forward, such as a running mean."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._devices = [device] if device.type == "cuda" else []
        self.changing: list[buffers.Buffer] = []

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """What runs in this context leaves buffers and random numbers as they were."""
        restore = buffers.save(buffers.all_buffers(self._module))
        try:
            with torch.random.fork_rng(self._devices):
                yield
        finally:
            restore()

    def as_now(self) -> Callable[[], AbstractContextManager[None]]:
        """Returns a context in which random numbers and buffers are what they are now. It leaves them as it finds
        them."""
        cpu = torch.get_rng_state()
        cuda = [torch.cuda.get_rng_state(device) for device in self._devices]
        restore_now = buffers.save(self.changing)

        @contextmanager
        def again() -> Iterator[None]:
            with torch.random.fork_rng(self._devices):
                torch.set_rng_state(cpu)
                for device, state in zip(self._devices, cuda, strict=True):
                    torch.cuda.set_rng_state(state, device)
                restore_later = buffers.save(self.changing)
                restore_now()
                yield
                restore_later()

        return again

    def snapshot(self) -> Callable[[], None]:
        """Saves what a step changes in the module: gradients, and buffers that forwards write. Returns a function that
        restores it."""
        gradients = [
            (p, p.grad, None if p.grad is None else p.grad.detach().to("cpu", copy=True))
            for p in self._module.parameters()
        ]
        restore_buffers = buffers.save(self.changing)

        def restore() -> None:
            for parameter, gradient, value in gradients:
                parameter.grad = gradient
                if gradient is not None and value is not None:
                    gradient.detach().copy_(value)
            restore_buffers()

        return restore
