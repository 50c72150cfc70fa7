"""`Calls`: which modules a stage calls, so that `hooked` can split their backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from optpipe_runtime.stage.split.hooked import BY_FUNCTION, Hooked, MakeMode, has_replacement
from optpipe_runtime.stage.split.mode import SCALES, is_norm, waiting
from optpipe_runtime.torch_private.modules import is_compiled, parameters_of


class Calls:
    """Filled in by `note`, which sees every call of the stage's first forward.

    Attributes
    ----------
    modules
        Those whose forward is replaced, in the order of their first calls.
    scaling
        Those that end in a product with their weight.
    computes_gradients
        Whether the stage's forward itself takes gradients of weights. It would not get those of detached ones, so then
        nothing is hooked.
    """

    def __init__(self, module: nn.Module) -> None:
        self.computes_gradients = False
        self.modules: dict[nn.Module, None] = {}
        self.scaling: dict[nn.Module, None] = {}
        self._other_weights = False  # whether there are calls with weights outside of these modules
        self._other_norms = False  # the same for weights that wait only where those of norms do
        self._by_weight = {
            id(parameters_of(part)["weight"]): part
            for part in _not_compiled(module)
            if "forward" not in vars(part) and "weight" in parameters_of(part)
        }

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Takes one call of a function of torch."""
        weights = waiting(func, args, kwargs)
        if not weights:
            return
        module = self._by_weight.get(id(weights[0]))
        if module is not None and _calls(module, func):
            self.modules[module] = None
        elif module is not None and _scales(module, func):
            self.scaling[module] = None
        elif is_norm(func):
            self._other_norms = True
        else:
            self._other_weights = True

    def need_mode(self, norms: bool) -> bool:
        """Whether there are calls that only the mode splits. `norms`: also those of norms are split."""
        return self._other_weights or (norms and self._other_norms)

    def hooked(self, norms: bool, make_mode: MakeMode) -> Hooked:
        if norms:
            return Hooked(self.modules, self.scaling, make_mode)
        return Hooked([part for part in self.modules if not isinstance(part, nn.LayerNorm | nn.RMSNorm)], (), make_mode)


def _not_compiled(module: nn.Module) -> Iterator[nn.Module]:
    """The submodules that are not part of a compiled one: a region would be compiled again for another forward."""
    if not is_compiled(module):
        yield module
        for part in module.children():
            yield from _not_compiled(part)


def _calls(module: nn.Module, func: Any) -> bool:
    """Whether a module's own forward is the one of torch that calls this function."""
    return func in BY_FUNCTION and type(module).forward is BY_FUNCTION[func].module.forward


def _scales(module: nn.Module, func: Any) -> bool:
    """Whether a call is a module's product with its weight; not within an autograd function, where no gradient is
    taken."""
    return func in SCALES and not has_replacement(module) and torch.is_grad_enabled()
