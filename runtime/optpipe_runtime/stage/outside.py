"""`Outside`: parameters and modules that a stage uses and its module does not have, such as those of `loss_fn`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from optpipe_runtime.stage.entrance import reached_leaves
from optpipe_runtime.stage.io import Tensors

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

    def note(self, outputs: Tensors, given: Tensors, module: nn.Module) -> None:
        """Takes the outputs of a forward, with their graph, and the tensors that it was given."""
        self._others.clear()
        leaves = {id(leaf): leaf for output in outputs for leaf in reached_leaves(output)}
        for tensor in (*given, *module.parameters()):
            leaves.pop(id(tensor), None)
        names = {id(parameter): name for name, parameter in self.named_parameters().items()}
        for leaf in leaves.values():
            if id(leaf) not in names:
                names[id(leaf)] = f"a tensor of shape {list(leaf.shape)}, number {len(self._others)}"
                self._others[names[id(leaf)]] = leaf  # type: ignore[assignment]  # any leaf does what a Parameter does
        self.reached = [names[key] for key in leaves]


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
    read = code.co_names if code else ()
    attributes = {name: entry for name, entry in getattr(owner, "__dict__", {}).items() if name in read}
    return attributes | dict(_of_function(function))


def _of_function(function: Any) -> Mapping[str, Any]:
    function = inspect.unwrap(function)
    if not inspect.isfunction(function) or (function.__module__ or "").partition(".")[0] == "torch":
        return {}
    try:
        variables = inspect.getclosurevars(function)
    except ValueError:  # a variable has no value yet
        return {}
    return {**variables.globals, **variables.nonlocals}
