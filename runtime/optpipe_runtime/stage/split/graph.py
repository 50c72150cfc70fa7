"""Splits the backward of any torch op with parameters.

The op becomes one node, `_Split`, with a graph of its own inside, as torch records it. At B autograd walks that graph
to the op's inputs; at W, with the same output gradient, to its parameters. Each walk computes only what is asked for,
by the kernels of a plain run. The outer node keeps what the op saves, so that `Activation` and checkpoints see it like
any other saved tensor. Nothing else of the stage waits for W. So with DTensors, too, placements and communication are
torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn import functional

from optpipe.errors import InputError
from optpipe_runtime.ranks.parts import local
from optpipe_runtime.stage.split.queue import can_wait, plain, weight_grads
from optpipe_runtime.torch_private.tensors import base, unview


def split(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """func(*args, **kwargs). It must return one tensor that its own backward does not need, because what follows may
    change it in place."""
    values = (*args, *kwargs.values())
    tensors = [i for i, value in enumerate(values) if isinstance(value, Tensor)]
    weights = [i for i in tensors if can_wait(values[i])]
    if not torch.is_grad_enabled():  # a forward that is to be recomputed
        return func(*args, **kwargs)
    if len(weights) in (0, len(tensors)) or not all(plain(local(values[i])) for i in tensors):
        return func(*args, **kwargs)  # no weights, only weights, or tensors of other kinds
    result: Tensor = _Split.apply(func, tuple(kwargs), weights, *values)  # type: ignore[no-untyped-call]
    return result


_EMBEDDING_OPTIONS = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


def embedding(input: Tensor, weight: Tensor, *options: Any, **named: Any) -> Tensor:
    """Indices have no gradient, so all of the backward waits for W."""
    named = dict(zip(_EMBEDDING_OPTIONS, options, strict=False)) | named
    if named.get("max_norm") is not None or named.get("sparse"):
        # Changes the weight; or has a gradient that W cannot add to another one.
        return functional.embedding(input, weight, **named)
    return split(functional.embedding, input, weight, **named)


class _Split(torch.autograd.Function):
    """In the inner graph inputs are no leaves, because leaves would hold their memory. Saved tensors are numbers in the
    list `kept`, which is empty until B."""

    @staticmethod
    def forward(
        ctx: Any, func: Callable[..., Tensor], names: tuple[str, ...], weights: list[int], *values: Any
    ) -> Tensor:
        inputs = [i for i in range(len(values)) if ctx.needs_input_grad[3 + i] and i not in weights]
        kept: list[Tensor] = []
        inner = list(values)
        with torch.enable_grad(), saved_tensors_hooks(lambda tensor: _number(kept, tensor), kept.__getitem__):
            if inputs:
                token = torch.empty(0, requires_grad=True)
                for i, entered in zip(inputs, _Inside.apply(token, *(values[i].detach() for i in inputs)), strict=True):  # type: ignore[no-untyped-call]
                    inner[i] = entered
            unnamed = len(inner) - len(names)
            y = func(*inner[:unnamed], **dict(zip(names, inner[unnamed:], strict=True)))
        ctx.save_for_backward(*kept)
        kept.clear()
        ctx.kept, ctx.y, ctx.inputs = kept, get_gradient_edge(y), {i: get_gradient_edge(inner[i]) for i in inputs}
        ctx.weights, ctx.count, ctx.name = {i: values[i] for i in weights}, len(values), func.__name__
        result = y.detach()
        return result if base(result) is None else unview(result)  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise InputError(
                f"a gradient is to be differentiated again, through {ctx.name}: that is not possible in a stage"
            )
        kept, y, inputs, weights = ctx.kept, ctx.y, ctx.inputs, ctx.weights
        kept[:] = ctx.saved_tensors

        def gradients(of: Sequence[Any]) -> Sequence[Tensor]:
            return torch.autograd.grad(y, of, dy, retain_graph=True)

        grads: dict[int, Tensor | None] = {}
        if inputs:
            grads |= zip(inputs, gradients(list(inputs.values())), strict=True)
        parameters = list(weights.values())
        grads |= zip(weights, weight_grads(parameters, lambda: gradients(parameters), dy, *kept), strict=True)
        return None, None, None, *map(grads.get, range(ctx.count))


def _number(kept: list[Tensor], tensor: Tensor) -> int:
    kept.append(tensor)
    return len(kept) - 1


class _Inside(torch.autograd.Function):
    """The inputs of an op in the inner graph. Walks end here, so its backward never runs."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError
