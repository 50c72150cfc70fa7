"""`Splitting`: the mode under which a stage's forwards run, so that a B leaves weight gradients to its W. The user's
modules are not changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from optpipe_runtime.stage.split import graph, hooked
from optpipe_runtime.stage.split.hooked import SCALES, Casts
from optpipe_runtime.torch_private.tensors import GROUPED_MM, is_mapping

aten = torch.ops.aten
Note = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], None]  # func, args, kwargs, and what it returned
_BY_GRAPH: frozenset[Any] = frozenset(
    {
        *(functional.conv1d, functional.conv2d, functional.conv3d),
        *(functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d, functional.bilinear),
        *(torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum),
        *(Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.baddbmm),
        *([] if GROUPED_MM is None else [GROUPED_MM]),
    }
)
_EXPORTED: frozenset[Any] = frozenset(  # the same, as torch.export writes them
    getattr(getattr(aten, name), overload)
    for name in (
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"),
        *("bilinear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "_grouped_mm", "embedding"),
    )
    if hasattr(aten, name)
    for overload in getattr(aten, name).overloads()
    if "out" not in overload
)
LINEAR = frozenset({functional.linear, aten.linear.default})
# Batch and group norms take too little time at W for the memory that they would hold until then.
_NORMS: dict[Any, Callable[..., Tensor]] = {
    **{func: partial(hooked.scale, func) for func in SCALES},
    **dict.fromkeys((functional.rms_norm, torch.rms_norm, aten.rms_norm.default), hooked.rms_norm),
    functional.layer_norm: hooked.layer_norm,
    aten.layer_norm.default: partial(graph.split, aten.layer_norm.default),
}
_OTHERS: dict[Any, Callable[..., Tensor]] = {
    **{func: partial(graph.split, func) for func in _BY_GRAPH | _EXPORTED},
    functional.embedding: graph.embedding,
}
_ALL = _OTHERS | _NORMS
_SEEN = frozenset({*_ALL, *LINEAR, functional.multi_head_attention_forward})
_ENDING = frozenset({*LINEAR, *_OTHERS, functional.multi_head_attention_forward})  # compiled regions


def is_norm(func: Any) -> bool:
    """Whether a call leaves weight gradients to W only where norms do."""
    return func in _NORMS


class Splitting(TorchFunctionMode):
    """While active, ops with parameters leave their weight gradients to the queue of the B that reaches them; norms and
    scales only with `norms`. Under autocast parameters are cast by `casts`.

    In a compiled module such an op ends the compiled region, and the next one begins after it: what lies between the
    ops stays compiled, norms too. With `whole` it stays in its region, and its gradient comes at B. So does that of ops
    within vmap and its like, which accept no custom autograd function. With `note`, calls outside of regions are only
    noted.
    """

    def __init__(
        self, norms: bool = True, casts: Casts | None = None, note: Note | None = None, whole: bool = False
    ) -> None:
        super().__init__()
        self._whole, self._note = whole, note
        self._split = _ALL if norms else _OTHERS
        self._casts = casts or Casts()

    def run(self, func: Any, *args: Any) -> Tensor:
        """Calls a function as in this mode."""
        result: Tensor = self.__torch_function__(func, (), args)
        return result

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _SEEN:
            return func(*args, **kwargs)
        if torch.compiler.is_compiling():
            ends = not self._whole and func in _ENDING and torch.is_grad_enabled() and _trains(*args, *kwargs.values())
            return self._interpreted(func, args, kwargs) if ends else func(*args, **kwargs)
        if is_mapping():
            return func(*args, **kwargs)
        if func is functional.multi_head_attention_forward and (self._note or torch.is_grad_enabled()):
            with self:
                return _opened(func)(*args, **kwargs)
        if self._note is not None:
            result = func(*args, **kwargs)
            self._note(func, args, kwargs, result)
            return result
        if func in LINEAR:  # without a graph, too: it keeps casts
            return hooked.linear(self._casts, *args, **kwargs)
        if not torch.is_grad_enabled():  # a forward that is to be recomputed
            return func(*args, **kwargs)
        return self._split.get(func, func)(*args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # so a region that calls it ends
    def _interpreted(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        result: Tensor = self.__torch_function__(func, (), args, kwargs)
        return result


def _trains(*arguments: Any) -> bool:
    return any(isinstance(value, nn.Parameter) and value.requires_grad for value in arguments)


@lru_cache
def _opened(func: FunctionType) -> FunctionType:
    """A function of torch.nn.functional that does not offer itself to a mode as a whole, so that the mode sees the ops
    in it."""
    names = func.__globals__ | {"has_torch_function": lambda _: False}
    opened = FunctionType(func.__code__, names, func.__name__, func.__defaults__)
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened
