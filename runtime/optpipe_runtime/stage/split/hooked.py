"""Splits the backward of linear layers and norms in less host time than nodes in Python take (`layers`, `graph`).

`calls` finds out which modules a stage calls. While the stage runs, these have a forward of their own:

- F calls torch's op on the detached weight, so that autograd will compute the gradient of the input alone. What the
  gradient of the weight needs is saved by the saved-tensor hooks in force, as autograd would save it.
- In B autograd calls a hook of the op's node, `WeightHook`, with the gradient of the output. It leaves a job to the
  queue (`queue`).
- W runs the job: the product by which autograd itself would compute the gradient of the weight.

Such a graph is for a B. If a BW is to come, torch's own graph is as good and faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from optpipe_runtime.stage.split import layers
from optpipe_runtime.stage.split.mode import SCALES, Splitting
from optpipe_runtime.stage.split.queue import Gradients
from optpipe_runtime.stage.split.weight_hook import WeightHook, register
from optpipe_runtime.torch_private.modules import parameters_of
from optpipe_runtime.torch_private.tensors import (
    base,
    has_hooks,
    is_mapping,
    without_subclass_functions,
)
from optpipe_runtime.torch_private.trees import tree_map_only

MakeMode = Callable[[], Splitting]


class Hooked:
    """While active, modules have a forward of their own.

    Parameters
    ----------
    modules
        Of the classes in `BY_FUNCTION`.
    scaling
        Modules of any class that end in a product with their weight, such as RMS norms that are written out. They keep
        their forward, and have a `ScalingWeight`.
    make_mode
        Makes the mode that splits a call for which there is no hook: of an input or a parameter of another kind.
    """

    def __init__(self, modules: Iterable[nn.Module], scaling: Iterable[nn.Module], make_mode: MakeMode) -> None:
        # What is written into `vars` of a module is found before its class's forward, and before its parameters.
        self._attributes: list[tuple[dict[str, Any], str, Any]] = [
            *(
                (vars(module), "forward", partial(_FORWARDS[type(module).forward], module, make_mode))
                for module in modules
            ),
            *((vars(module), "weight", ScalingWeight.wrap(parameters_of(module)["weight"])) for module in scaling),
        ]

    def __enter__(self) -> None:
        for attributes, name, value in self._attributes:
            attributes[name] = value

    def __exit__(self, *error: object) -> None:
        for attributes, name, _ in self._attributes:
            attributes.pop(name, None)


# Forwards of modules


def _linear(module: nn.Linear, make_mode: MakeMode, input: Tensor) -> Tensor:
    parameters: dict[str, Any] = parameters_of(module)
    weight, bias = parameters["weight"], parameters["bias"]
    if not _is_simple(input, weight, bias):
        return make_mode().run(functional.linear, input, weight, bias)
    y = functional.linear(input, weight.detach(), None if bias is None else bias.detach())
    gradients = _linear_gradient if bias is None else _linear_gradients
    viewed = base(y)  # the node of y itself leaves the graph if what follows changes y in place
    register(y if viewed is None else viewed, WeightHook(_present(weight, bias), gradients, input))
    return y


def _layer_norm(module: nn.LayerNorm, make_mode: MakeMode, input: Tensor) -> Tensor:
    parameters: dict[str, Any] = parameters_of(module)
    shape = module.normalized_shape
    weight, bias = parameters["weight"], parameters["bias"]
    if not _is_simple(input, weight, bias):
        return make_mode().run(functional.layer_norm, input, shape, weight, bias, module.eps)
    plain_bias = None if bias is None else bias.detach()
    y, mean, rstd = torch.native_layer_norm(input, shape, weight.detach(), plain_bias, module.eps)

    def gradients(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Gradients:
        asked = (False, True, bias is not None)  # not that of x, which autograd computes in B
        grads: Gradients = torch.ops.aten.native_layer_norm_backward(dy, x, shape, mean, rstd, weight, bias, asked)
        return grads[1:2] if bias is None else grads[1:]

    # Detached, because mean and rstd have the node that keeps the hook.
    register(y, WeightHook(_present(weight, bias), gradients, input, mean.detach(), rstd.detach()))
    return y


def _rms_norm(module: nn.RMSNorm, make_mode: MakeMode, input: Tensor) -> Tensor:
    parameters: dict[str, Any] = parameters_of(module)
    weight, shape = parameters["weight"], module.normalized_shape
    if _is_simple(input, weight, None) and layers.ends_in_product(input.device.type):
        return _scale(functional.rms_norm(input, shape, None, module.eps), weight)
    return make_mode().run(functional.rms_norm, input, shape, weight, module.eps)


def _embedding(module: nn.Embedding, make_mode: MakeMode, input: Tensor) -> Tensor:
    """Indices have no gradient, so there is no node for a hook: all of the backward waits for W."""
    options = module.padding_idx, module.max_norm, module.norm_type, module.scale_grad_by_freq, module.sparse
    return make_mode().run(functional.embedding, input, module.weight, *options)


def _scale(x: Tensor, weight: Tensor) -> Tensor:
    """x * weight"""
    y = torch.mul(x, weight.detach())
    register(y, WeightHook((weight,), lambda dy, x: ((dy * x).sum_to_size(weight.shape),), x))
    return y


def _linear_gradient(dy: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return (dy.reshape(-1, dy.shape[-1]).t().mm(x.reshape(-1, x.shape[-1])),)


def _linear_gradients(dy: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return *_linear_gradient(dy, x), dy.reshape(-1, dy.shape[-1]).sum(0)


class Replaced(NamedTuple):
    """A class of modules, and the forward that is put in the place of its own."""

    module: type[nn.Module]
    forward: Callable[..., Tensor]


BY_FUNCTION: dict[Any, Replaced] = {  # by the function that the class's own forward calls
    functional.linear: Replaced(nn.Linear, _linear),
    functional.layer_norm: Replaced(nn.LayerNorm, _layer_norm),
    functional.embedding: Replaced(nn.Embedding, _embedding),
    functional.rms_norm: Replaced(nn.RMSNorm, _rms_norm),
}
# By the class's own forward, which a subclass may have, too.
_FORWARDS: dict[Any, Callable[..., Tensor]] = {entry.module.forward: entry.forward for entry in BY_FUNCTION.values()}


def has_replacement(module: nn.Module) -> bool:
    return type(module).forward in _FORWARDS


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
        if func in SCALES and not kwargs and len(args) == 2:
            scale, x = args if isinstance(args[0], cls) else args[::-1]
            if not isinstance(x, cls) and isinstance(x, Tensor) and _is_simple(x, scale.parameter, None):
                return _scale(x, scale.parameter)
        with without_subclass_functions():
            args, kwargs = tree_map_only(cls, lambda scale: scale.parameter, (args, dict(kwargs or {})))
            return func(*args, **kwargs)


# Which calls have hooks


def _is_simple(input: Tensor, weight: Any, bias: Any) -> bool:
    """Whether the op will have a node that computes the input's gradient, and the parameters are plain leaves."""
    return (
        type(input) is Tensor
        and weight is not None
        and input.requires_grad
        and torch.is_grad_enabled()
        and _is_plain_leaf(weight)
        and (bias is None or _is_plain_leaf(bias))
        and input.dtype == weight.dtype
        and input.dtype.is_floating_point
        and input.layout is torch.strided
        and not torch.is_autocast_enabled(input.device.type)
        and not torch.compiler.is_compiling()
        and not is_mapping()
    )


def _is_plain_leaf(parameter: Any) -> bool:
    """Whether a gradient may be added to a parameter outside of autograd."""
    return type(parameter) is nn.Parameter and parameter.requires_grad and not has_hooks(parameter)


def _present(*parameters: Any) -> tuple[Tensor, ...]:
    return tuple(parameter for parameter in parameters if parameter is not None)
