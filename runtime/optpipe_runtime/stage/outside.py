"""`Outside`: parameters and modules that a stage uses and its module does not have, such as those of `loss_fn`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import ReferenceType

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

DEEPEST = 4  # functions that call functions, lists in lists
MOST_ENTRIES = 64  # of a list or a dict


class Outside:
    """Of one stage. Modules and parameters are looked for where a loss usually has them; others are found by the graph
    of the first forward."""

    def __init__(self, loss_fn: Callable[..., Any] | None, module: nn.Module) -> None:
        own = {id(part) for part in module.modules()} | {id(parameter) for parameter in module.parameters()}
        self._modules: dict[str, nn.Module] = {}
        self._tensors: dict[str, nn.Parameter] = {}
        self._others: dict[str, nn.Parameter] = {}
        self.reached: list[str] = []  # names of the parameters from which the first forward computed the result
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
    owner, function = None, value
    if inspect.ismethod(value):
        owner, function = value.__self__, value.__func__
    elif callable(value) and not inspect.isclass(value) and not inspect.isfunction(value):
        owner, function = value, type(value).__call__
    if isinstance(owner, nn.Module):
        return {"self": owner}
    function = inspect.unwrap(function) if callable(function) else None
    if not inspect.isfunction(function) or (function.__module__ or "").partition(".")[0] == "torch":
        return {}
    entries: dict[Any, Any] = {**dict(enumerate(function.__defaults__ or ())), **(function.__kwdefaults__ or {})}
    with suppress(ValueError):  # a variable has no value yet
        variables = inspect.getclosurevars(function)
        entries |= {**variables.globals, **variables.nonlocals}
    read = function.__code__.co_names
    inside = {f"{name}.{part}": v for name, each in entries.items() for part, v in _read(each, read).items()}
    return {**_read(owner, read), **entries, **inside}


def _read(owner: Any, names: Iterable[str]) -> Mapping[str, Any]:
    """The attributes of an object, or the parts of a module, that have one of these names."""
    attributes = dict(owner.named_children()) if isinstance(owner, nn.Module) else getattr(owner, "__dict__", {})
    return {name: attributes[name] for name in names if name in attributes}
