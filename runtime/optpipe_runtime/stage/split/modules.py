"""Modules that keep weight gradients in a queue of their own, as TransformerEngine's do with
`delay_wgrad_compute=True`.

Their backward computes the gradient of the input only. Each `backward_dw()` then computes the weight gradients of one
backward, the oldest first. B counts how often such a module's backward ran, and W calls `backward_dw()` as often. If
the Ws of two micro-batches come in another order than their Bs, a W does the other's work: equally much, and the sum in
the end is the same. A fused BW calls it at its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from optpipe_runtime.stage.split.queue import accumulate, accumulated, filling


def delaying(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those that delay weight gradients."""
    any_modules: list[Any] = [part for part in modules if hasattr(part, "need_backward_dw")]
    return [part for part in any_modules if part.need_backward_dw()]


class Delayed:
    """The modules of a stage that delay weight gradients. While `watched`, what they leave behind in a B is queued for
    its W."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._pending: Counter[nn.Module] = Counter()  # backwards whose weight gradients are still to be computed
        self._at_b: set[Tensor] = set()  # their parameters whose gradient autograd adds at B nevertheless

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Wraps the stage's forwards, and its backwards, because a checkpoint runs forwards in a backward."""
        handles = [module.register_forward_hook(self._watch) for module in self._modules]
        before = {parameter: accumulated(parameter) for module in self._modules for parameter in module.parameters()}
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._at_b |= {parameter for parameter, state in before.items() if accumulated(parameter) != state}

    def drain(self) -> None:
        """After a step that was given up: computes and drops what the modules still keep."""
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
                # The module may keep it. It may also keep its input, which the stage's activation counts.
                queue.watch(gradient)
        self._pending[module] += 1
        queue.push(lambda: accumulate(*self._oldest(module)))

    def _oldest(self, module: nn.Module) -> tuple[list[Tensor], list[Tensor | None]]:
        """The gradients of its oldest backward. TransformerEngine sets `.grad` where autograd would add to it, so
        `.grad` is put aside meanwhile."""
        self._pending[module] -= 1
        aside = {parameter: parameter.grad for parameter in module.parameters() if parameter not in self._at_b}
        for parameter in aside:
            parameter.grad = None
        module.backward_dw()  # type: ignore[operator]
        gradients = [parameter.grad for parameter in aside]
        for parameter, before in aside.items():
            parameter.grad = before
        return list(aside), gradients
