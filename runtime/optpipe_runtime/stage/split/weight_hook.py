"""`WeightHook`: called by autograd in B, before a node that computes the gradient of an op's input alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from optpipe.errors import InputError
from optpipe_runtime.memory.saved import Staying
from optpipe_runtime.stage.split.queue import Gradients, accumulate, filling
from optpipe_runtime.torch_private.tensors import saved_tensors_hooks_in_force


class WeightHook:
    """Leaves to W what one call of an op owes its parameters.

    Parameters
    ----------
    parameters
        Whose gradients W is to add to.
    gradients
        Computes these, from the gradient of the op's output and the saved tensors.
    saved
        Tensors that it needs of the forward. The hook lets go of them when it is called.
    """

    __slots__ = ("_gradients", "_kept", "_parameters", "_unpack")

    def __init__(self, parameters: Sequence[Tensor], gradients: Callable[..., Gradients], *saved: Tensor) -> None:
        self._parameters, self._gradients = parameters, gradients
        hooks = saved_tensors_hooks_in_force()
        if hooks is None:
            self._kept: Sequence[Any] = [Staying(tensor) for tensor in saved]
            self._unpack: Callable[[Any], Tensor] = Staying.tensor
        else:
            pack, self._unpack = hooks
            self._kept = [pack(tensor) for tensor in saved]

    def __call__(self, output_gradients: Sequence[Tensor | None]) -> None:
        """Called by autograd before the op's node."""
        dy, queue = output_gradients[0], filling()
        if queue is None:
            _require_first_derivative()
            return
        if dy is None:  # the loss does not depend on this call
            return
        tensors = dy, *map(self._unpack, self._kept)
        self._kept = ()
        if queue.deferring:
            queue.push(partial(self._add, tensors), tensors)
        else:
            self._add(tensors)

    def _add(self, tensors: Sequence[Tensor]) -> None:
        accumulate(self._parameters, self._gradients(*tensors), tensors)


def register(output: Tensor, hook: WeightHook) -> None:
    node: Any = output.grad_fn
    node.register_prehook(hook)


def _require_first_derivative() -> None:
    """No backward of a stage is under way, so the user's forward itself takes a gradient. That of inputs is right,
    unless it is to be differentiated again: it would then lack the detached weights."""
    if torch.is_grad_enabled():
        raise InputError(
            "a gradient is to be differentiated again, through a linear layer or a layer norm, which did not "
            "happen in the stage's first forward: that is not possible in a stage"
        )
