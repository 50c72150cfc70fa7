"""Ops that leave their weight gradients to W.

Linear layers, layer norms and products with a weight, in which norms end that are written out, have hooks:

- F calls torch's op on the detached weight, so that autograd will compute the gradient of the input alone. What the
  gradient of the weight needs is saved by the saved-tensor hooks in force, as autograd would save it.
- In B autograd calls a hook of the op's node, `WeightHook`, with the gradient of the output. It leaves a job to the
  queue (`queue`).
- W runs the job: the product by which autograd itself would compute the gradient of the weight.

Any other op becomes one node, `_Split`, with a graph of its own inside, as torch records it (`by_graph`). At B autograd
walks that graph to the op's inputs; at W, with the same output gradient, to its parameters. Each walk computes only
what is asked for, by the kernels of a plain run. The outer node keeps what the op saves, so that `Activation` and
checkpoints see it like any other saved tensor. So with DTensors, too, placements and communication are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn import functional

from optpipe.errors import InputError
from optpipe_runtime.memory.activation import Staying, storage_key
from optpipe_runtime.stage.io import enter
from optpipe_runtime.stage.split.queue import Gradients, accumulate, can_wait, filling, plain, weight_grads
from optpipe_runtime.torch_private.tensors import base, has_hooks, local, saved_tensors_hooks_in_force, unview, version


def by_graph(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
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


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Indices have no gradient, so all of the backward waits for W."""
    options: Any = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if max_norm is not None or sparse:  # changes the weight, or has a gradient that W cannot add to another one
        return functional.embedding(input, weight, *options)
    return by_graph(functional.embedding, input, weight, *options)


class _Split(torch.autograd.Function):
    """Walks of the inner graph end where inputs `enter` it. `kept` has saved tensors by number, from B on."""

    @staticmethod
    def forward(
        ctx: Any, func: Callable[..., Tensor], names: tuple[str, ...], weights: list[int], *values: Any
    ) -> Tensor:
        inputs = [i for i in range(len(values)) if ctx.needs_input_grad[3 + i] and i not in weights]
        kept: list[Tensor] = []
        inner = list(values)
        with torch.enable_grad(), saved_tensors_hooks(lambda tensor: _number(kept, tensor), kept.__getitem__):
            entered = enter(tuple(values[i].detach() for i in inputs), range(len(inputs)), [])
            for i, tensor in zip(inputs, entered, strict=True):
                inner[i] = tensor
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


class WeightHook:
    """Leaves to W what one call of an op owes its parameters. Autograd calls it in B, before the node of the op's
    output. `gradients` computes theirs from that of the output and the `saved` tensors of the forward, of which the
    hook lets go when it is called."""

    __slots__ = ("_gradients", "_kept", "_parameters", "_unpack")

    def __init__(
        self, output: Tensor, parameters: Sequence[Tensor], gradients: Callable[..., Gradients], *saved: Tensor
    ) -> None:
        self._parameters, self._gradients = parameters, gradients
        hooks = saved_tensors_hooks_in_force()
        if hooks is None:
            self._kept: Sequence[Any] = [Staying(tensor) for tensor in saved]
            self._unpack: Callable[[Any], Tensor] = Staying.tensor
        else:
            pack, self._unpack = hooks
            self._kept = [pack(tensor) for tensor in saved]
        node: Any = output.grad_fn
        node.register_prehook(self)

    def __call__(self, output_gradients: Sequence[Tensor | None]) -> None:
        dy, queue = output_gradients[0], filling()
        if queue is None:  # the user's forward takes a gradient: that of inputs is right
            if torch.is_grad_enabled():  # and would lack the detached weights
                raise InputError(
                    "a gradient is to be differentiated again, through a linear layer or a layer norm, which did not "
                    "happen in the stage's first forward: that is not possible in a stage"
                )
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


class Casts:
    """Under autocast, makes each cast of a parameter once a step, for all micro-batches and all of their ops; as torch
    does within an autocast context. Like parameters, casts are no activations: their storages are added to `staying`.
    `nbytes` is what the casts of the last step took."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.staying: set[int] = set()
        self._cast: dict[tuple[Tensor, torch.dtype], tuple[int, Tensor]] = {}

    def cast(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Detached."""
        if parameter.dtype == dtype:
            return parameter.detach()
        seen, cast = self._cast.get((parameter, dtype), (-1, parameter))
        if seen != version(parameter):
            cast = parameter.detach().to(dtype)
            self._cast[parameter, dtype] = version(parameter), cast
            self.staying.add(storage_key(cast))
        return cast

    def storages(self) -> set[int]:
        return {storage_key(cast) for _, cast in self._cast.values()}

    def clear(self) -> None:
        """At the end of a step: parameters may change, and not every change counts as a version."""
        self.nbytes = sum(cast.nbytes for _, cast in self._cast.values())
        self._cast.clear()


# Ops. A norm that is written out ends in a product with its weight.

SCALES: frozenset[Any] = frozenset({torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.ops.aten.mul.Tensor})


def linear(casts: Casts, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    cast = torch.is_autocast_enabled(input.device.type)
    if not _are_plain(input, weight, bias) or not (cast or input.dtype == weight.dtype):
        return by_graph(functional.linear, input, weight, bias)
    if cast:
        input = input.to(torch.get_autocast_dtype(input.device.type))
    plain_bias = None if bias is None else casts.cast(bias, input.dtype)
    y = functional.linear(input, casts.cast(weight, input.dtype), plain_bias)
    if y.requires_grad:
        viewed = base(y)  # the node of y itself leaves the graph if what follows changes y in place
        gradients, parameters = (_linear_gradient, (weight,)) if bias is None else (_linear_gradients, (weight, bias))
        WeightHook(y if viewed is None else viewed, parameters, gradients, input)
    return y


def _linear_gradient(dy: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return (dy.reshape(-1, dy.shape[-1]).t().mm(x.reshape(-1, x.shape[-1])),)


def _linear_gradients(dy: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return *_linear_gradient(dy, x), dy.reshape(-1, dy.shape[-1]).sum(0)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if not _has_node(input, weight, bias):
        return by_graph(functional.layer_norm, input, normalized_shape, weight, bias, eps)
    assert weight is not None
    shape, plain_bias = tuple(normalized_shape), None if bias is None else bias.detach()
    y, mean, rstd = torch.native_layer_norm(input, shape, weight.detach(), plain_bias, eps)

    def gradients(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Gradients:
        asked = (False, True, bias is not None)  # not that of x, which autograd computes in B
        grads: Gradients = torch.ops.aten.native_layer_norm_backward(dy, x, shape, mean, rstd, weight, bias, asked)
        return grads[1:2] if bias is None else grads[1:]

    # Detached, because mean and rstd have the node that keeps the hook.
    WeightHook(y, (weight,) if bias is None else (weight, bias), gradients, input, mean.detach(), rstd.detach())
    return y


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if weight is None or not _ends_in_product(input.device.type):
        return by_graph(functional.rms_norm, input, normalized_shape, weight, eps)
    # The product alone is split: gradients of its input then add up in torch's own order.
    return scale(torch.mul, functional.rms_norm(input, normalized_shape, None, eps), weight)


@lru_cache
def _ends_in_product(device: str) -> bool:
    """Whether torch computes an RMS norm by simpler ops, of which the last one is the product with the weight."""
    with saved_tensors_hooks(lambda saved: saved, lambda saved: saved), torch.enable_grad():
        x, weight = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
        return type(functional.rms_norm(x, (2,), weight).grad_fn).__name__ == "MulBackward0"


def scale(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """The product of two tensors, one of which may be a weight."""
    for x, weight in (args, args[::-1]) if len(args) == 2 and not kwargs else ():
        if _has_node(x, weight):
            y = torch.mul(x, weight.detach())
            WeightHook(y, (weight,), partial(_scale_gradient, weight.shape), x)
            return y
    return by_graph(func, *args, **kwargs)


def _scale_gradient(shape: torch.Size, dy: Tensor, x: Tensor) -> Gradients:
    return ((dy * x).sum_to_size(shape),)


def _has_node(input: Any, weight: Any, bias: Any = None) -> bool:
    """Whether the op will have a node that computes the input's gradient, with parameters that are plain leaves."""
    return (
        _are_plain(input, weight, bias)
        and input.requires_grad
        and torch.is_grad_enabled()
        and input.dtype == weight.dtype
        and not torch.is_autocast_enabled(input.device.type)
    )


def _are_plain(input: Any, weight: Any, bias: Any) -> bool:
    return (
        type(input) is Tensor
        and plain(input)
        and input.dtype.is_floating_point
        and (input.requires_grad or not torch.is_grad_enabled())
        and _is_plain_leaf(weight)
        and (bias is None or _is_plain_leaf(bias))
    )


def _is_plain_leaf(parameter: Any) -> bool:
    """Whether a gradient may be added to a parameter outside of autograd."""
    return type(parameter) is nn.Parameter and parameter.requires_grad and not has_hooks(parameter)
