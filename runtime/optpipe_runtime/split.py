"""Split backward: the input gradient now (B), the weight gradient later (W), for linear and embedding layers.

While a forward runs under `Splitting`, `F.linear` and `F.embedding` of leaf parameters go through autograd functions of our own.
Their backward computes the input gradient and, where the op is a B, only notes (input, output gradient) in the `WeightQueue`; `W` does the
products. Every other parameter (norms, scales, convolutions) gets its gradient at B. The user's modules stay as they are.

W adds to `.grad` itself, so autograd's hooks on those parameters (post-accumulate-grad hooks, DDP's reducer) do not fire for a split
backward. A weight queued for W is a parameter held by reference, never one unpacked from saved tensors: that would be an alias whose
`.grad` is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class WeightQueue:
    """The weight gradients of one stage and micro-batch that B left for W."""

    def __init__(self) -> None:
        self.deferring = False
        self._jobs: list[tuple[Callable[[], None], tuple[Tensor, ...]]] = []

    def push(self, job: Callable[[], None], holds: tuple[Tensor, ...]) -> None:
        self._jobs.append((job, holds))

    def held(self) -> Iterable[Tensor]:
        """The tensors that live until W."""
        return (tensor for _, holds in self._jobs for tensor in holds)

    @torch.no_grad()
    def run(self) -> None:
        """W: adds every queued gradient to its parameter's `.grad`, and lets go of what each needed as soon as it is done."""
        jobs = self._jobs[::-1]
        self._jobs = []
        while jobs:
            job, _ = jobs.pop()
            job()


class Splitting(TorchFunctionMode):
    """While active, linear and embedding layers compute their weight gradients through `queue`."""

    def __init__(self, queue: WeightQueue) -> None:
        super().__init__()
        self.queue = queue

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            return _linear(self.queue, *args, **kwargs)
        if func is functional.embedding:
            return _embedding(self.queue, *args, **kwargs)
        return func(*args, **kwargs)


def accumulate(parameter: Tensor, grad: Tensor) -> None:
    """What autograd does with the gradient of a leaf, outside autograd."""
    if parameter.grad is None:
        parameter.grad = grad.to(parameter.dtype)
    else:
        parameter.grad += grad


def _can_wait(weight: Tensor) -> bool:
    return torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf


def _linear(queue: WeightQueue, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not _can_wait(weight) or not (bias is None or (bias.is_leaf and bias.requires_grad)):
        return functional.linear(input, weight, bias)
    if torch.is_autocast_enabled(input.device.type):
        input = input.to(torch.get_autocast_dtype(input.device.type))
    result: Tensor = _Linear.apply(queue, input, weight, bias)  # type: ignore[no-untyped-call]
    return result


def _embedding(
    queue: WeightQueue,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if not _can_wait(weight) or max_norm is not None or sparse:
        return functional.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    result: Tensor = _Embedding.apply(queue, input, weight, padding, scale_grad_by_freq)  # type: ignore[no-untyped-call]
    return result


class _Linear(torch.autograd.Function):
    """y = x weightᵀ + bias for x of any number of dimensions; the products are those of plain autograd, so the bits are the same."""

    @staticmethod
    def forward(ctx: Any, queue: WeightQueue, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.queue, ctx.weight, ctx.bias = queue, weight, bias
        with torch.autocast(x.device.type, enabled=False):
            y = functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
            own: Tensor = torch.ops.aten._unsafe_view(y, y.shape)  # a view, as y may be, could not be changed in place by what follows
            return own

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        flat_x, flat_dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            dx = flat_dy.mm(weight.to(dy.dtype)).view(x.shape) if ctx.needs_input_grad[1] else None
            if ctx.queue.deferring:
                ctx.queue.push(lambda: _linear_weight(weight, bias, flat_x, flat_dy), (flat_x, flat_dy))
                return None, dx, None, None
            return None, dx, flat_dy.t().mm(flat_x).to(weight.dtype), None if bias is None else flat_dy.sum(0).to(bias.dtype)


def _linear_weight(weight: Tensor, bias: Tensor | None, x: Tensor, dy: Tensor) -> None:
    accumulate(weight, dy.t().mm(x))
    if bias is not None:
        accumulate(bias, dy.sum(0))


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queue: WeightQueue, indices: Tensor, weight: Tensor, padding: int, scale_by_frequency: bool) -> Any:
        ctx.save_for_backward(indices)
        ctx.queue, ctx.weight, ctx.how = queue, weight, (padding, scale_by_frequency)
        return torch.ops.aten.embedding(weight, indices, padding, scale_by_frequency, False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        weight, how = ctx.weight, ctx.how

        def gradient() -> Tensor:
            grad: Tensor = torch.ops.aten.embedding_dense_backward(dy, indices, weight.shape[0], *how)
            return grad

        if ctx.queue.deferring:
            ctx.queue.push(lambda: accumulate(weight, gradient()), (indices, dy))
            return (None,) * 5
        return None, None, gradient(), None, None
