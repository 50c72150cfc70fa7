"""Splits the backward of the ops of which most stages consist: linear layers, layer norms, and products with a weight,
in which norms end that are written out.

- F calls torch's op on the detached weight, so that autograd will compute the gradient of the input alone. What the
  gradient of the weight needs is saved by the saved-tensor hooks in force, as autograd would save it.
- In B autograd calls a hook of the op's node, `WeightHook`, with the gradient of the output. It leaves a job to the
  queue (`queue`).
- W runs the job: the product by which autograd itself would compute the gradient of the weight.

A call whose input has no gradient, or whose parameters are no plain leaves, is split by `graph`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableSet, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from optpipe.errors import InputError
from optpipe_runtime.memory.saved import Staying, storage_key
from optpipe_runtime.stage.split import graph
from optpipe_runtime.stage.split.queue import Gradients, accumulate, filling, plain
from optpipe_runtime.torch_private.modules import parameters_of
from optpipe_runtime.torch_private.tensors import (
    base,
    has_hooks,
    is_mapping,
    saved_tensors_hooks_in_force,
    version,
    without_subclass_functions,
)
from optpipe_runtime.torch_private.trees import tree_map_only


class WeightHook:
    """Leaves to W what one call of an op owes its parameters. Autograd calls it in B, before the op's node.

    Parameters
    ----------
    output
        Of the op.
    parameters
        Whose gradients W is to add to.
    gradients
        Computes these, from the gradient of the op's output and the saved tensors.
    saved
        Tensors that it needs of the forward. The hook lets go of them when it is called.
    """

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

    def __init__(self, staying: MutableSet[int] | None = None) -> None:
        self.nbytes = 0
        self.staying: MutableSet[int] = set() if staying is None else staying
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
        """Of the casts that there are."""
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
        return graph.split(functional.linear, input, weight, bias)
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
        return graph.split(functional.layer_norm, input, normalized_shape, weight, bias, eps)
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
        return graph.split(functional.rms_norm, input, normalized_shape, weight, eps)
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
            return _scaled(x, weight)
    return graph.split(func, *args, **kwargs)


def _scaled(x: Tensor, weight: Tensor) -> Tensor:
    y = torch.mul(x, weight.detach())
    WeightHook(y, (weight,), lambda dy, x: ((dy * x).sum_to_size(weight.shape),), x)
    return y


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


# Modules


class Hooked:
    """While active, modules have a forward of their own, so that no mode has to see every call of torch.

    Parameters
    ----------
    modules
        With a forward that can be replaced (`called_by`).
    scaling
        Modules of any class that end in a product with their weight, such as RMS norms that are written out. They keep
        their forward, and have a `ScalingWeight`.
    run
        Calls a function of torch so that its backward is split.
    """

    def __init__(self, modules: Iterable[nn.Module], scaling: Iterable[nn.Module], run: Callable[..., Tensor]) -> None:
        # What is written into `vars` of a module is found before its class's forward, and before its parameters.
        self._forwards = [(vars(module), _replaced(module, run)) for module in modules]
        self._scaling = [(vars(module), parameters_of(module)) for module in scaling]

    def __enter__(self) -> None:
        for attributes, forward in self._forwards:
            attributes["forward"] = forward
        for attributes, parameters in self._scaling:
            attributes["weight"] = ScalingWeight.wrap(parameters["weight"])

    def __exit__(self, *error: object) -> None:
        for attributes, _ in self._forwards:
            attributes.pop("forward", None)
        for attributes, _ in self._scaling:
            attributes.pop("weight", None)


# By the class's own forward, which a subclass may have, too: the function that it calls, and with what after the input.
_FORWARDS: dict[Any, tuple[Any, Callable[[Any, Mapping[str, Any]], tuple[Any, ...]]]] = {
    nn.Linear.forward: (functional.linear, lambda part, own: (own["weight"], own["bias"])),
    nn.LayerNorm.forward: (
        functional.layer_norm,
        lambda part, own: (part.normalized_shape, own["weight"], own["bias"], part.eps),
    ),
    nn.RMSNorm.forward: (functional.rms_norm, lambda part, own: (part.normalized_shape, own["weight"], part.eps)),
    nn.Embedding.forward: (
        functional.embedding,
        lambda part, own: (
            own["weight"],
            part.padding_idx,
            part.max_norm,
            part.norm_type,
            part.scale_grad_by_freq,
            part.sparse,
        ),
    ),
}


def called_by(module: nn.Module) -> Any:
    """The function that a module's forward calls, if it can be replaced; else None."""
    return _FORWARDS[type(module).forward][0] if type(module).forward in _FORWARDS else None


def _replaced(module: nn.Module, run: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    func, options = _FORWARDS[type(module).forward]
    own = parameters_of(module)
    return lambda input: run(func, input, *options(module, own))


class ScalingWeight(Tensor):
    """A parameter by which a module multiplies. In any other op it is the parameter itself. Where no op is called, as
    by an autograd function, it is a view of the parameter."""

    parameter: Tensor

    @classmethod
    def wrap(cls, parameter: Any) -> ScalingWeight:
        with torch.enable_grad():
            weight: ScalingWeight = parameter.as_subclass(cls)
        weight.parameter = parameter
        return weight

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with without_subclass_functions():
            args, kwargs = tree_map_only(cls, lambda scale: scale.parameter, (args, dict(kwargs or {})))
            if func in SCALES and len(args) == 2 and not kwargs and not is_mapping():
                for x, weight in (args, args[::-1]):
                    if _has_node(x, weight):
                        return _scaled(x, weight)
            return func(*args, **kwargs)
