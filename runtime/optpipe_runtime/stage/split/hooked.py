"""Splits the backward of linear layers and layer norms in less host time than nodes in Python take.

`Calls` notes which modules a forward calls. While a stage runs, these have a forward of their own: torch's op on a
detached weight, so that autograd computes the input gradient alone, with a hook on its node, which leaves the output
gradient to W. What else W needs is saved through the saved-tensor hooks in force, as autograd would save it. Such a
graph is for a B; if a BW is to come, torch's own graph is as good and faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from optpipe.errors import InputError
from optpipe_runtime.memory.activation import Staying
from optpipe_runtime.stage.split import layers
from optpipe_runtime.stage.split.mode import SCALES, Splitting, is_norm, waiting
from optpipe_runtime.stage.split.queue import accumulate, filling


class Hooked:
    """These modules with forwards of their own, while active, and the `scaling` ones with a weight of its own. What
    needs a node in Python gets it from `splitting`."""

    def __init__(
        self, modules: Iterable[nn.Module], splitting: Callable[[], Splitting], scaling: Iterable[nn.Module] = ()
    ) -> None:
        self._forwards: list[tuple[dict[str, Any], Callable[..., Tensor]]] = [
            (vars(module), partial(_FORWARDS[type(module).forward], module, splitting)) for module in modules
        ]
        self._scales = [(vars(module), _Scale.of(module._parameters["weight"])) for module in scaling]

    def __enter__(self) -> None:
        for attributes, forward in self._forwards:
            attributes["forward"] = forward
        for attributes, weight in self._scales:
            attributes["weight"] = weight  # is found before the parameter

    def __exit__(self, *error: object) -> None:
        for attributes, _ in self._forwards:
            attributes.pop("forward", None)
        for attributes, _ in self._scales:
            attributes.pop("weight", None)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile was given this module."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _interpreted(module: nn.Module) -> Iterator[nn.Module]:
    """The submodules that are not part of a compiled one: a region would be compiled again for another forward."""
    if not is_compiled(module):
        yield module
        for part in module.children():
            yield from _interpreted(part)


class Calls:
    """What a stage calls: `modules` are those that `Hooked` takes, `scaling` those that end in a product with their
    weight, as RMS norms that are written out. `others` tells whether weights are used outside of them, and
    `other_norms` whether those of norms are. `walked` tells whether the stage computes gradients within its forward, by
    which it would miss weights that are detached."""

    def __init__(self, module: nn.Module) -> None:
        self.modules: dict[nn.Module, None] = {}
        self.scaling: dict[nn.Module, None] = {}
        self.others = self.other_norms = self.walked = False
        self._by_weight = {
            id(part._parameters["weight"]): part
            for part in _interpreted(module)
            if "forward" not in vars(part) and "weight" in part._parameters
        }

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        weights = waiting(func, args, kwargs)
        module = self._by_weight.get(id(weights[0])) if weights else None
        if module is not None and type(module).forward is _OF_MODULES.get(func):
            self.modules[module] = None
        elif (
            module is not None
            and func in SCALES
            and type(module).forward not in _FORWARDS
            and torch.is_grad_enabled()  # not within an autograd function
        ):
            self.scaling[module] = None
        elif weights:
            self.others |= not is_norm(func)
            self.other_norms |= is_norm(func)

    def need_mode(self, norms: bool) -> bool:
        return self.others or (norms and self.other_norms)

    def hooked(self, norms: bool, splitting: Callable[[], Splitting]) -> Hooked:
        if norms:
            return Hooked(self.modules, splitting, self.scaling)
        return Hooked([part for part in self.modules if not isinstance(part, nn.LayerNorm | nn.RMSNorm)], splitting)


def _linear(module: nn.Linear, splitting: Callable[[], Splitting], input: Tensor) -> Tensor:
    parameters: dict[str, Any] = module._parameters
    weight, bias = parameters["weight"], parameters["bias"]
    if not _simple(input, weight, bias):
        return splitting().run(functional.linear, input, weight, bias)
    y = functional.linear(input, weight.detach(), None if bias is None else bias.detach())
    base = y._base  # what follows may change y in place, which takes a view's own node out of the graph
    node: Any = y.grad_fn if base is None else base.grad_fn
    node.register_prehook(_LinearHook(weight, bias, input))
    return y


def _layer_norm(module: nn.LayerNorm, splitting: Callable[[], Splitting], input: Tensor) -> Tensor:
    parameters: dict[str, Any] = module._parameters
    weight, bias, shape = parameters["weight"], parameters["bias"], module.normalized_shape
    if not _simple(input, weight, bias):
        return splitting().run(functional.layer_norm, input, shape, weight, bias, module.eps)
    y, mean, rstd = torch.native_layer_norm(
        input, shape, weight.detach(), None if bias is None else bias.detach(), module.eps
    )
    # Detached, because these two have the node that keeps the hook.
    node: Any = y.grad_fn
    node.register_prehook(_LayerNormHook(weight, bias, input, mean.detach(), rstd.detach(), shape=shape))
    return y


def _embedding(module: nn.Embedding, splitting: Callable[[], Splitting], input: Tensor) -> Tensor:
    options = module.padding_idx, module.max_norm, module.norm_type, module.scale_grad_by_freq, module.sparse
    return splitting().run(functional.embedding, input, module.weight, *options)


def _scaled(x: Tensor, weight: Tensor) -> Tensor:
    y = torch.mul(x, weight.detach())
    node: Any = y.grad_fn
    node.register_prehook(_ScaleHook(weight, None, x))
    return y


def _rms_norm(module: nn.RMSNorm, splitting: Callable[[], Splitting], x: Tensor) -> Tensor:
    shape, weight = module.normalized_shape, module._parameters["weight"]
    if _simple(x, weight, None) and layers.ends_in_product(x.device.type):
        return _scaled(functional.rms_norm(x, shape, None, module.eps), module.weight)
    return splitting().run(functional.rms_norm, x, shape, weight, module.eps)


_FORWARDS: dict[Any, Callable[..., Tensor]] = {
    nn.Linear.forward: _linear,
    nn.LayerNorm.forward: _layer_norm,
    nn.Embedding.forward: _embedding,
    nn.RMSNorm.forward: _rms_norm,
}


_OF_MODULES: dict[Any, Any] = {  # functions, with the forwards of the modules that call them
    functional.linear: nn.Linear.forward,
    functional.layer_norm: nn.LayerNorm.forward,
    functional.embedding: nn.Embedding.forward,
    functional.rms_norm: nn.RMSNorm.forward,
}


class _Scale(Tensor):
    """A parameter by which a module multiplies. In any other op it is the parameter itself. Where no op is called, as
    by an autograd function, it is a view of the parameter."""

    parameter: Tensor

    @classmethod
    def of(cls, parameter: Any) -> _Scale:
        with torch.enable_grad():
            made: _Scale = parameter.as_subclass(cls)
        made.parameter = parameter
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in SCALES and not kwargs and len(args) == 2:
            scale, x = args if isinstance(args[0], cls) else args[::-1]
            if not isinstance(x, cls) and isinstance(x, Tensor) and _simple(x, scale.parameter, None):
                return _scaled(x, scale.parameter)
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map_only(cls, lambda scale: scale.parameter, (args, dict(kwargs or {})))
            return func(*args, **kwargs)


def _simple(input: Tensor, weight: Any, bias: Any) -> bool:
    """Whether the input has a node to come after, and the parameters are plain leaves without hooks."""
    return (
        type(input) is Tensor
        and weight is not None
        and input.requires_grad
        and torch.is_grad_enabled()
        and _leaf(weight)
        and (bias is None or _leaf(bias))
        and input.dtype == weight.dtype
        and input.dtype.is_floating_point
        and input.layout is torch.strided
        and not torch.is_autocast_enabled(input.device.type)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def _leaf(parameter: Any) -> bool:
    return (
        type(parameter) is nn.Parameter
        and parameter.requires_grad
        and not parameter._backward_hooks
        and not parameter._post_accumulate_grad_hooks
    )


class _Hook:
    """Leaves to W what one call of a module needs. It lets go of that when it is called."""

    __slots__ = ("_kept", "_unpack", "bias", "shape", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, *saved: Tensor, shape: Sequence[int] = ()) -> None:
        self.weight, self.bias, self.shape = weight, bias, tuple(shape)
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is None:
            self._kept: Sequence[Any] = [Staying(tensor) for tensor in saved]
            self._unpack: Callable[[Any], Tensor] = Staying.tensor
        else:
            pack, self._unpack = hooks
            self._kept = [pack(tensor) for tensor in saved]

    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        dy, queue = gradients[0], filling()
        if queue is None:  # a gradient within a forward
            if torch.is_grad_enabled():
                raise InputError(
                    "a gradient is to be differentiated again, through a linear layer or a layer norm, which did not "
                    "happen in the stage's first forward: that is not possible in a stage"
                )
            return
        if dy is None:
            return
        saved = [self._unpack(kept) for kept in self._kept]
        self._kept = ()
        job, holds = self.job(dy, *saved)
        if queue.deferring:
            queue.push(job, holds)
        else:
            job()

    def job(self, dy: Tensor, *saved: Tensor) -> tuple[Callable[[], None], Sequence[Tensor]]:
        raise NotImplementedError


class _LinearHook(_Hook):
    __slots__ = ()

    def job(self, dy: Tensor, *saved: Tensor) -> tuple[Callable[[], None], Sequence[Tensor]]:
        (x,) = saved
        if x.dim() != 2:
            x = x.reshape(-1, x.shape[-1])
        if dy.dim() != 2:
            dy = dy.reshape(-1, dy.shape[-1])
        holds = x, dy
        weight, bias = self.weight, self.bias

        def run() -> None:
            if bias is None:
                accumulate((weight,), (dy.t().mm(x),), holds)
            else:
                accumulate((weight, bias), (dy.t().mm(x), dy.sum(0)), holds)

        return run, holds


class _ScaleHook(_Hook):
    __slots__ = ()

    def job(self, dy: Tensor, *saved: Tensor) -> tuple[Callable[[], None], Sequence[Tensor]]:
        (x,) = saved
        weight, holds = self.weight, (dy, x)
        return lambda: accumulate((weight,), ((dy * x).sum_to_size(weight.shape),), holds), holds


class _LayerNormHook(_Hook):
    __slots__ = ()

    def job(self, dy: Tensor, *saved: Tensor) -> tuple[Callable[[], None], Sequence[Tensor]]:
        x, mean, rstd = saved
        weight, bias, shape, holds = self.weight, self.bias, self.shape, (dy, *saved)

        def run() -> None:
            found = torch.ops.aten.native_layer_norm_backward(
                dy, x, shape, mean, rstd, weight, bias, (False, True, bias is not None)
            )
            accumulate((weight,) if bias is None else (weight, bias), found[1:2] if bias is None else found[1:], holds)

        return run, holds
