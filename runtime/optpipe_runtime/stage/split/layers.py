"""Splits the backward of linear layers and norms, of which most stages consist. A linear layer and a layer norm are a
node of their own, which takes less host time than `graph` and can be differentiated again. It computes the same
products as plain autograd. With parameters that are DTensors, and for all else, `graph` splits torch's own op."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn import functional

from optpipe_runtime.memory.saved import require_unchanged
from optpipe_runtime.stage.split import graph
from optpipe_runtime.stage.split.queue import can_wait, not_a_view, plain, waits, weight_grads
from optpipe_runtime.torch_private.tensors import version


class Casts:
    """Makes each cast of a parameter once a step, for all micro-batches, for F and B; as torch does within an autocast
    context. `nbytes` is what the casts of the last step took."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._made: dict[tuple[Tensor, torch.dtype], tuple[int, Tensor]] = {}

    def cast(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        if parameter.dtype == dtype:
            return parameter
        if type(parameter) is not nn.Parameter:  # a view is another tensor in every forward
            return parameter.to(dtype)
        seen, cast = self._made.get((parameter, dtype), (-1, parameter))
        if seen != version(parameter):
            cast = parameter.detach().to(dtype)
            self._made[parameter, dtype] = version(parameter), cast
        return cast

    def clear(self) -> None:
        """At the end of a step: parameters may change, and not every change counts as a version."""
        self.nbytes = sum(cast.nbytes for _, cast in self._made.values())
        self._made.clear()


def linear(casts: Casts, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, DTensor) or input.is_complex():
        return graph.split(functional.linear, input, weight, bias)
    if not plain(input) or not can_wait(weight) or not (bias is None or can_wait(bias)):
        return functional.linear(input, weight, bias)
    if torch.is_autocast_enabled(input.device.type):
        input = input.to(torch.get_autocast_dtype(input.device.type))
    elif input.dtype != weight.dtype:
        return functional.linear(input, weight, bias)  # raises torch's own error
    if not torch.is_grad_enabled():  # a forward that is to be recomputed
        return functional.linear(
            input, casts.cast(weight, input.dtype), None if bias is None else casts.cast(bias, input.dtype)
        )
    result: Tensor = _Linear.apply(input, weight, bias, casts)  # type: ignore[no-untyped-call]
    return result


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    options = padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
    if max_norm is not None or sparse:  # changes the weight; or has a gradient that W cannot add to another one
        return functional.embedding(input, weight, *options)
    return graph.split(functional.embedding, input, weight, *options)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if torch.is_autocast_enabled(input.device.type) or isinstance(weight, DTensor):
        return graph.split(functional.layer_norm, input, normalized_shape, weight, bias, eps)
    if weight is None or not plain(input) or not can_wait(weight) or not (bias is None or can_wait(bias)):
        return functional.layer_norm(input, normalized_shape, weight, bias, eps)
    result: Tensor = _LayerNorm.apply(input, tuple(normalized_shape), weight, bias, eps)  # type: ignore[no-untyped-call]
    return result


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if weight is None or not ends_in_product(input.device.type):
        return graph.split(functional.rms_norm, input, normalized_shape, weight, eps)
    # The product alone is split: gradients of its input then add up in torch's own order.
    return graph.split(torch.mul, functional.rms_norm(input, normalized_shape, None, eps), weight)


@lru_cache
def ends_in_product(device: str) -> bool:
    """Whether torch computes an RMS norm by simpler ops, of which the last one is the product with the weight."""
    with saved_tensors_hooks(_same, _same), torch.enable_grad():
        x, weight = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
        return type(functional.rms_norm(x, (2,), weight).grad_fn).__name__ == "MulBackward0"


def _same(saved: Tensor) -> Tensor:
    return saved


class _Linear(torch.autograd.Function):
    """y = x weightᵀ + bias for x of any number of dimensions. Under autocast x is cast already, and the parameters are
    cast by `casts`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, casts: Casts) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.casts, ctx.version = weight, bias, casts, version(weight)
        y = not_a_view(
            functional.linear(x, casts.cast(weight, x.dtype), None if bias is None else casts.cast(bias, x.dtype))
        )
        ctx.waiting = waits(y, x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        flat_x, flat_dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        dx = None
        if ctx.needs_input_grad[0]:
            require_unchanged(version(weight) != ctx.version, weight.shape)
            dx = flat_dy.mm(ctx.casts.cast(weight, dy.dtype)).view(x.shape)
        if bias is None:
            return dx, *weight_grads((weight,), lambda: (flat_dy.t().mm(flat_x),), flat_x, flat_dy), None, None
        grads = weight_grads((weight, bias), lambda: (flat_dy.t().mm(flat_x), flat_dy.sum(0)), flat_x, flat_dy)
        return dx, *grads, None


class _LayerNorm(torch.autograd.Function):
    """y = (x - mean) rstd weight + bias over the last dimensions, `shape`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...], weight: Tensor, bias: Tensor | None, eps: float) -> Any:
        y, mean, rstd = torch.ops.aten.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd)
        ctx.shape, ctx.weight, ctx.bias, ctx.version = shape, weight, bias, version(weight)
        ctx.waiting = waits(y, x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        saved, shape, weight, bias = ctx.saved_tensors, ctx.shape, ctx.weight, ctx.bias

        def gradients(*which: bool) -> Any:
            return torch.ops.aten.native_layer_norm_backward(dy, saved[0], shape, *saved[1:], weight, bias, which)

        dx = None
        if ctx.needs_input_grad[0]:
            require_unchanged(version(weight) != ctx.version, weight.shape)
            dx = gradients(True, False, False)[0]
        if bias is None:
            return (
                dx,
                None,
                *weight_grads((weight,), lambda: gradients(False, True, False)[1:2], dy, *saved),
                None,
                None,
            )
        return dx, None, *weight_grads((weight, bias), lambda: gradients(False, True, True)[1:], dy, *saved), None
