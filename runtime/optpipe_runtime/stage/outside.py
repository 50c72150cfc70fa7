"""`Outside`: parameters and modules that a stage uses and its module does not have, such as those of `loss_fn`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from optpipe_runtime.stage.io import Tensors, reached_leaves

DEEPEST = 4  # functions that call functions, lists in lists
MOST_ENTRIES = 64  # of a list or a dict


class Outside:
    """Of one stage. Modules and parameters are looked for where a loss usually has them; others are found by the graph
    of the first forward.

    Attributes
    ----------
    reached
        Names of the parameters from which the first forward computed the stage's result.
    """

    def __init__(self, loss_fn: Callable[..., Any] | None, module: nn.Module) -> None:
        own = {id(part) for part in module.modules()} | {id(parameter) for parameter in module.parameters()}
        self._modules: dict[str, nn.Module] = {}
        self._tensors: dict[str, nn.Parameter] = {}
        self._others: dict[str, nn.Parameter] = {}
        self.reached: list[str] = []
        for name, value in _held(loss_fn, "loss_fn", DEEPEST):
            if isinstance(value, nn.Module) and own.isdisjoint(map(id, value.modules())):
                self._modules[name] = value
            elif isinstance(value, nn.Parameter) and id(value) not in own:
                self._tensors[name] = value

    def modules(self) -> list[nn.Module]:
        return [part for module in self._modules.values() for part in module.modules()]

    @property
    def has_replicas(self) -> bool:
        return any(isinstance(part, DistributedDataParallel | FSDPModule) for part in self.modules())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        inside = {
            f"{name}.{inner}": parameter
            for name, module in self._modules.items()
            for inner, parameter in module.named_parameters()
        }
        return inside | self._tensors | self._others

    def note(self, leaves: Sequence[ReferenceType[Tensor]]) -> None:
        """Takes the leaves of a forward's graph, when the graph is no more."""
        self._others.clear()
        names = {id(parameter): name for name, parameter in self.named_parameters().items()}
        alive = [leaf for reference in leaves if (leaf := reference()) is not None]  # others the forward has made
        for leaf in alive:
            if id(leaf) not in names:
                names[id(leaf)] = f"a tensor of shape {list(leaf.shape)}, number {len(self._others)}"
                self._others[names[id(leaf)]] = leaf  # type: ignore[assignment]  # any leaf does what a Parameter does
        self.reached = [names[id(leaf)] for leaf in alive if isinstance(leaf, nn.Parameter)]


def leaves_of(outputs: Tensors, without: Tensors) -> list[ReferenceType[Tensor]]:
    """The leaves of the graph of some outputs but for these."""
    leaves = {id(leaf): leaf for output in outputs for leaf in reached_leaves(output)}
    for tensor in without:
        leaves.pop(id(tensor), None)
    return [ref(leaf) for leaf in leaves.values()]


def _held(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """The modules and parameters that a function, or another value, holds."""
    if isinstance(value, nn.Module | Tensor):
        yield name, value
    elif depth:
        for inner, entry in _entries(value).items():
            yield from _held(entry, f"{name}.{inner}", depth - 1)


def _entries(value: Any) -> Mapping[Any, Any]:
    """What a function calls or reads, by name; what a list or a dict has."""
    if isinstance(value, partial):
        return {"func": value.func, **dict(enumerate(value.args)), **value.keywords}
    if isinstance(value, dict | list | tuple):
        pairs = value if isinstance(value, dict) else dict(enumerate(value))
        return pairs if len(pairs) <= MOST_ENTRIES else {}
    if inspect.ismethod(value):
        return _of_method(value.__self__, value.__func__)
    if inspect.isfunction(value):
        return _of_function(value)
    called = type(value).__call__ if callable(value) and not inspect.isclass(value) else None
    if inspect.isfunction(called):
        return _of_method(value, called)
    return {}


def _of_method(owner: Any, function: Any) -> Mapping[str, Any]:
    """A method's module, or of another object the attributes that the method reads."""
    if isinstance(owner, nn.Module):
        return {"self": owner}
    code = getattr(inspect.unwrap(function), "__code__", None)
    return {**_read(owner, code.co_names if code else ()), **_of_function(function)}


def _of_function(function: Any) -> Mapping[str, Any]:
    function = inspect.unwrap(function)
    if not inspect.isfunction(function) or (function.__module__ or "").partition(".")[0] == "torch":
        return {}
    try:
        variables = inspect.getclosurevars(function)
    except ValueError:  # a variable has no value yet
        return {}
    entries: dict[Any, Any] = {
        **dict(enumerate(function.__defaults__ or ())),
        **(function.__kwdefaults__ or {}),
        **variables.globals,
        **variables.nonlocals,
    }
    read = function.__code__.co_names
    inside = {
        f"{name}.{attribute}": v for name, owner in entries.items() for attribute, v in _read(owner, read).items()
    }
    return entries | inside


def _read(owner: Any, names: Iterable[str]) -> Mapping[str, Any]:
    """The attributes of an object, or the parts of a module, that have one of these names."""
    attributes = dict(owner.named_children()) if isinstance(owner, nn.Module) else getattr(owner, "__dict__", {})
    return {name: attributes[name] for name in names if name in attributes}
