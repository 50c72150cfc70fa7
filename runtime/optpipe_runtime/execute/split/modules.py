"""Modules that keep weight gradients in a queue of their own, as TransformerEngine's do with
`delay_wgrad_compute=True`.

Their backward computes the gradient of the input only; each `backward_dw()` then does the weight gradients of one
backward, the oldest first. B notes how often such a module's backward ran, and W calls `backward_dw()` as often. Where
the Ws of two micro-batches come in another order than their Bs, a W does the other's work: as much of it, with the same
sum in the end. A fused BW calls it at its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from optpipe_runtime.execute.split.queue import accumulate, accumulated, filling

_registered: tuple[type[nn.Module], ...] = ()


def register_split(kind: type[nn.Module]) -> None:
    """Before the Pipeline is made: modules of this class delay weight gradients; `backward_dw()` does those of the
    oldest backward.

    Not needed for a module that says so itself, by `need_backward_dw() -> bool`, as TransformerEngine's do.
    """
    global _registered
    _registered = (*_registered, kind)


def delaying(module: nn.Module) -> list[nn.Module]:
    """The modules in it that delay weight gradients."""
    return [part for part in module.modules() if _delays(part)]


def _delays(module: nn.Module) -> bool:
    asked = getattr(module, "need_backward_dw", None)
    return isinstance(module, _registered) if asked is None else bool(asked())


class Delayed:
    """The modules of a stage that delay. While `watched`, what they leave behind in a B is queued for its W."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._pending: Counter[nn.Module] = Counter()  # backwards whose weight gradients they keep
        self._at_b: set[Tensor] = set()  # their parameters whose gradient autograd adds, at B, all the same

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around the stage's forwards and backwards: a checkpoint runs forwards in a backward."""
        handles = [module.register_forward_hook(self._watch) for module in self._modules]
        before = {parameter: accumulated(parameter) for module in self._modules for parameter in module.parameters()}
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._at_b |= {parameter for parameter, state in before.items() if accumulated(parameter) != state}

    def drain(self) -> None:
        """After a step that was given up: what the modules still keep belongs to no gradient."""
        for module in self._modules:
            while self._pending[module]:
                self._oldest(module)

    def _watch(self, module: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) else output
        node = getattr(first, "grad_fn", None)
        if node is not None and any(parameter.requires_grad for parameter in module.parameters()):
            node.register_prehook(partial(self._ran, module))

    def _ran(self, module: nn.Module, gradients: Sequence[Tensor | None]) -> None:
        queue = filling()
        if queue is None:
            return
        for gradient in gradients:
            if gradient is not None:
                queue.watch(
                    gradient
                )  # which the module may keep, as it may keep its input, that the stage's activation watches
        self._pending[module] += 1
        queue.push(lambda: accumulate(*self._oldest(module)))

    def _oldest(self, module: nn.Module) -> tuple[list[Tensor], list[Tensor | None]]:
        """Gradients of its oldest backward. TransformerEngine sets `.grad` where autograd adds to it; so in here it
        finds none."""
        self._pending[module] -= 1
        aside = {parameter: parameter.grad for parameter in module.parameters() if parameter not in self._at_b}
        for parameter in aside:
            parameter.grad = None
        module.backward_dw()  # type: ignore[operator]
        found = [parameter.grad for parameter in aside]
        for parameter, before in aside.items():
            parameter.grad = before
        return list(aside), found
