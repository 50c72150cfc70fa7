"""`Splitting`: the mode under which a stage's forwards run, so that a B leaves weight gradients to its W. The user's
modules are not changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from optpipe_runtime.stage.split import graph, layers
from optpipe_runtime.stage.split.layers import Casts
from optpipe_runtime.stage.split.queue import can_wait
from optpipe_runtime.torch_private.tensors import GROUPED_MM, is_mapping

aten = torch.ops.aten
Note = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]  # func, args, kwargs
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
_WAITING: dict[Any, Callable[..., Tensor]] = {func: partial(graph.split, func) for func in _BY_GRAPH | _EXPORTED} | {
    functional.embedding: layers.embedding,
}
# A norm that is written out ends in a product with its scale.
SCALES: frozenset[Any] = frozenset({torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, aten.mul.Tensor})
_NORMS: dict[Any, Callable[..., Tensor]] = {func: partial(graph.split, func) for func in SCALES} | {
    **dict.fromkeys((functional.rms_norm, torch.rms_norm, aten.rms_norm.default), layers.rms_norm),
    functional.layer_norm: layers.layer_norm,
    aten.layer_norm.default: partial(graph.split, aten.layer_norm.default),
}
_WITH_NORMS = _WAITING | _NORMS
_ENDING = frozenset({*LINEAR, *_WAITING, functional.multi_head_attention_forward})  # compiled regions


def waiting(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The weights of a call whose gradients may wait for W, by any of the ways here."""
    if func not in LINEAR and func is not functional.multi_head_attention_forward and func not in _WITH_NORMS:
        return []
    return [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and can_wait(value)]


def is_norm(func: Any) -> bool:
    """Whether a call leaves weight gradients to W only where norms do."""
    return func in _NORMS


class Splitting(TorchFunctionMode):
    """While active, ops with parameters leave their weight gradients to the queue of the B that reaches them; norms and
    scales only with `norms`. Under autocast parameters are cast by `casts`.

    In a compiled module such an op ends the compiled region, and the next one begins after it: what lies between the
    ops stays compiled, norms too. With `whole` it stays in its region, and its gradient comes at B. So does that of ops
    within vmap and its like, which accept no custom autograd function. `note` is told all calls outside of regions.
    """

    def __init__(
        self, norms: bool = True, casts: Casts | None = None, note: Note | None = None, whole: bool = False
    ) -> None:
        super().__init__()
        self._whole = whole
        self._waiting = _WITH_NORMS if norms else _WAITING
        self._note = note
        self._casts = casts or Casts()

    def run(self, func: Any, *args: Any) -> Tensor:
        """Calls a function as in this mode."""
        result: Tensor = self.__torch_function__(func, (), args)
        return result

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            ends = not self._whole and func in _ENDING and torch.is_grad_enabled() and _trains(*args, *kwargs.values())
            return self._interpreted(func, args, kwargs) if ends else func(*args, **kwargs)
        if is_mapping():
            return func(*args, **kwargs)
        if self._note is not None:
            self._note(func, args, kwargs)
        if func in LINEAR:  # without a graph, too: it keeps casts
            return layers.linear(self._casts, *args, **kwargs)
        if not torch.is_grad_enabled():  # a forward that is to be recomputed
            return func(*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            with self:
                return _opened(func)(*args, **kwargs)
        split = self._waiting.get(func, func)
        return split(*args, **kwargs)

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


def would_hold(edges: Iterable[GradientEdge]) -> int:
    """An upper bound on the bytes that a graph made under `Splitting` leaves to W: inputs of its ops, each counted
    once, and the gradients that reach them."""
    nodes: list[Any] = [edge.node for edge in edges]
    seen = set(nodes)
    for node in nodes:  # the list grows in the loop
        fresh = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= fresh
        nodes += fresh
    owed: list[tuple[int, dict[int, int]]] = [node.waiting for node in nodes if hasattr(node, "waiting")]
    inputs = {key: nbytes for _, inputs in owed for key, nbytes in inputs.items()}
    return sum(nbytes for nbytes, _ in owed) + sum(inputs.values())
