"""`SplitBackward`: what one stage's forwards and backwards run in, so that a B leaves weight gradients to W."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache, partial
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from optpipe.model.ops import Kind
from optpipe_runtime.memory.activation import storage_key
from optpipe_runtime.stage.split import ops
from optpipe_runtime.stage.split.ops import SCALES, Casts
from optpipe_runtime.stage.split.queue import Delayed, WeightQueue, can_wait
from optpipe_runtime.torch_private.tensors import (
    GROUPED_MM,
    is_compiled,
    is_mapping,
    local,
    parameters_of,
    tree_map_only,
    without_subclass_functions,
)

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
    **{func: partial(ops.scale, func) for func in SCALES},
    **dict.fromkeys((functional.rms_norm, torch.rms_norm, aten.rms_norm.default), ops.rms_norm),
    functional.layer_norm: ops.layer_norm,
    aten.layer_norm.default: partial(ops.by_graph, aten.layer_norm.default),
}
_OTHERS: dict[Any, Callable[..., Tensor]] = {
    **{func: partial(ops.by_graph, func) for func in _BY_GRAPH | _EXPORTED},
    functional.embedding: ops.embedding,
}
_ALL = _OTHERS | _NORMS
_SEEN = frozenset({*_ALL, *LINEAR, functional.multi_head_attention_forward})
_ENDING = frozenset({*LINEAR, *_OTHERS, functional.multi_head_attention_forward})  # compiled regions


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
            return ops.linear(self._casts, *args, **kwargs)
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
    """The function of torch.nn.functional, but a mode sees the ops in it, and not the function as a whole."""
    names = func.__globals__ | {"has_torch_function": lambda _: False}
    opened = FunctionType(func.__code__, names, func.__name__, func.__defaults__)
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened


_NOTHING: AbstractContextManager[object] = nullcontext()


class Hooked:
    """While active, modules that can be replaced (`called_by`) have a forward of their own, which `run`s a function of
    torch so that its backward is split. So no mode has to see every call. `scaling` are modules of any class that end
    in a product with their weight, such as RMS norms that are written out. They keep their forward, and have a
    `ScalingWeight`."""

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


_embedding_options = attrgetter("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
# By the class's own forward, which a subclass may have, too: the function that it calls, and with what after the input.
_FORWARDS: dict[Any, tuple[Any, Callable[[Any, Mapping[str, Any]], tuple[Any, ...]]]] = {
    nn.Linear.forward: (functional.linear, lambda part, own: (own["weight"], own["bias"])),
    nn.LayerNorm.forward: (
        functional.layer_norm,
        lambda part, own: (part.normalized_shape, own["weight"], own["bias"], part.eps),
    ),
    nn.RMSNorm.forward: (functional.rms_norm, lambda part, own: (part.normalized_shape, own["weight"], part.eps)),
    nn.Embedding.forward: (functional.embedding, lambda part, own: (own["weight"], *_embedding_options(part))),
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
            if func in SCALES and not is_mapping():
                return ops.scale(func, *args, **kwargs)
            return func(*args, **kwargs)


class Calls:
    """Which calls of torch a stage makes with weights, filled in by `note`."""

    def __init__(self, module: nn.Module) -> None:
        # Whether the stage's forward itself takes gradients. It would not get those of detached weights, so then
        # nothing is split.
        self.takes_gradients = False
        self.modules: dict[nn.Module, None] = {}  # those whose forward can be replaced, in the order of first calls
        self.scaling: dict[nn.Module, None] = {}  # those that end in a product with their weight
        self.other_weights = False  # whether there are calls with weights outside of these modules
        self.other_norms = False  # the same for weights that wait only where those of norms do
        self._input_bytes: dict[int, int] = {}  # by storage
        self._output_bytes = 0
        self._by_weight = {
            id(parameters_of(part)["weight"]): part
            for part in _not_compiled(module)
            if "forward" not in vars(part) and "weight" in parameters_of(part)
        }

    @property
    def would_hold(self) -> int:
        """Most bytes that a B leaves to W: inputs of calls, each counted once, and gradients of their outputs."""
        return self._output_bytes + sum(self._input_bytes.values())

    @contextmanager
    def noting(self, whole: bool) -> Iterator[None]:
        """Around a forward, in which nothing is split."""
        with saved_tensors_hooks(Tensor.detach, self._unpack), Splitting(note=self.note, whole=whole):
            yield

    def _unpack(self, saved: Tensor) -> Tensor:
        self.takes_gradients = True
        return saved

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        """Takes one call of a function that may be split."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        weights = [tensor for tensor in tensors if can_wait(tensor)]
        if not weights:
            return
        self._output_bytes += local(result).nbytes
        for tensor in tensors:
            if tensor.requires_grad and all(tensor is not weight for weight in weights):
                nbytes = local(tensor).numel() * (result if func in LINEAR else tensor).itemsize  # autocast
                self._input_bytes[storage_key(tensor)] = nbytes
        module = self._by_weight.get(id(weights[0]))
        if module is not None and called_by(module) is func:
            self.modules[module] = None
        elif module is not None and func in SCALES and called_by(module) is None:
            self.scaling[module] = None
        elif func in _NORMS:
            self.other_norms = True
        else:
            self.other_weights = True


def _not_compiled(module: nn.Module) -> Iterator[nn.Module]:
    """The submodules that are not part of a compiled one: a region would be compiled again for another forward."""
    if not is_compiled(module):
        yield module
        for part in module.children():
            yield from _not_compiled(part)


class SplitBackward:
    def __init__(
        self,
        modules: Iterable[nn.Module],
        named_parameters: Callable[[], Mapping[str, nn.Parameter]],
        device: torch.device,
    ) -> None:
        self._named_parameters, self._device = named_parameters, device
        self.delayed, self.casts = Delayed(modules), Casts()
        self.calls: Calls | None = None  # what `learn` has seen called
        self.at_b: frozenset[str] | None = None  # parameters whose gradient does not wait for W, after the first B
        self.norms_wait = True  # norms leave their weight gradients to W, too
        self.whole = False  # compiled regions must not end at ops that could be split

    def learn_anew(self, module: nn.Module) -> None:
        self.calls, self.at_b, self.norms_wait, self.whole = Calls(module), None, True, False

    @contextmanager
    def splitting(self, backward: Kind | None, as_torch: bool) -> Iterator[None]:
        """Around the user's forwards, and around backwards, which may run forwards again: lets ops leave their weight
        gradients to W, by hooks on modules where these will do, else by a mode, which sees every call. `backward` is
        the op that will come, None if that may be any; `as_torch`: torch's own graph is as small for a BW."""
        calls, mode = self.calls, Splitting(self.norms_wait, self.casts, whole=self.whole)
        if calls is None or calls.takes_gradients or (backward == Kind.BW and as_torch):
            splitting = _NOTHING
        elif backward == Kind.B and not (calls.other_weights or (self.norms_wait and calls.other_norms)):
            norms = nn.LayerNorm, nn.RMSNorm
            modules = [part for part in calls.modules if self.norms_wait or not isinstance(part, norms)]
            splitting = Hooked(modules, calls.scaling if self.norms_wait else (), mode.run)
        else:
            splitting = mode
        with splitting, self.delayed.watched():
            yield

    @contextmanager
    def finding_at_b(self) -> Iterator[None]:
        """Around the first B: finds `at_b`, the parameters to which autograd adds a gradient in this context, also
        where a hook of Megatron's moves it into `main_grad`."""
        added: set[str] = set()

        def noting(name: str) -> Callable[[Any, Any], None]:
            return lambda _, gradients: added.add(name) if gradients[0] is not None else None

        # They live until the end of it: a reentrant checkpoint makes its graph in here, and would make others.
        nodes = {name: get_gradient_edge(p).node for name, p in self._named_parameters().items() if p.requires_grad}
        with ExitStack() as hooks:
            for name, node in nodes.items():
                hooks.callback(node.register_hook(noting(name)).remove)
            yield
        self.at_b = frozenset(added)

    def run(self, queue: WeightQueue) -> None:
        """What B has left to W."""
        with self.without_autocast():
            queue.run()

    def without_autocast(self) -> AbstractContextManager[None]:
        """A backward computes in the types of its forward, so autocast around a whole step must not reach it."""
        kind = self._device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
