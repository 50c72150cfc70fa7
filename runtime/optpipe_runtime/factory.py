"""`Setup`: what a user's function tells `optpipe profile` about a model.

# model.py, for `optpipe profile --model model:factory --ranks 2 --microbatches 8`
def factory(rank: int, ranks: int) -> Setup:
    placement = list(range(ranks))
    return Setup({rank: make_stage(rank)}, placement, F.cross_entropy, *first_batch(), {"full_duplex": True})
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from optpipe.errors import InputError
from optpipe_runtime.pipeline import Pipeline
from optpipe_runtime.stage.io import LossFn

REQUIRED = ("stages", "placement", "loss_fn", "microbatches")  # arguments of `Pipeline` that are no options


@dataclass(frozen=True)
class Setup:
    """What `optpipe profile` measures on one rank. Modules and tensors must be on the rank's device: `cuda:0` for the
    first rank of a node, and so on, by LOCAL_RANK.

    Attributes
    ----------
    stages, placement, loss_fn
        Arguments of `Pipeline`.
    inputs, targets
        A whole batch, as for `Pipeline.step`.
    options
        Further arguments of `Pipeline`, by name.
    kwargs
        Named arguments of the stages, as for `Pipeline.step`.
    """

    stages: Mapping[int, nn.Module]
    placement: Sequence[int]
    loss_fn: LossFn
    inputs: Any
    targets: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    kwargs: Mapping[Any, Any] = field(default_factory=dict)

    def pipeline(self, microbatches: int) -> Pipeline:
        """Makes the pipeline. Collective. Raises `InputError` for an unknown option."""
        names = [name for name in inspect.signature(Pipeline).parameters if name not in REQUIRED]
        for name in self.options:
            if name not in names:
                raise InputError(f"options has {name!r}: must be one of {', '.join(names)}")
        return Pipeline(self.stages, self.placement, self.loss_fn, microbatches, **self.options)


def find_factory(name: str) -> Callable[[int, int], Setup]:
    """The function that `module:function` names. The module may be in the current folder or beside the script. Raises
    `InputError` if there is none."""
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name.isidentifier()):
        raise InputError(f"model = {name!r}: must be MODULE:FUNCTION, such as train.model:factory")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise InputError(f"model = {name!r}: {module_name} cannot be imported: {error}") from None
    factory = getattr(module, function_name, None)
    if not callable(factory):
        there = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise InputError(
            f"model = {name!r}: {module_name} has no function {function_name}; it has {', '.join(there) or 'none'}"
        )
    try:
        inspect.signature(factory).bind(0, 1)
    except TypeError as error:
        raise InputError(f"model = {name!r}: it is called with rank and ranks: {error}") from None
    return _checked(name, factory)


def _checked(name: str, factory: Callable[[int, int], Any]) -> Callable[[int, int], Setup]:
    def checked(rank: int, ranks: int) -> Setup:
        made = factory(rank, ranks)
        if not isinstance(made, Setup):
            raise InputError(
                f"model = {name!r}: it returned a {type(made).__name__}, optpipe_runtime.Setup was expected"
            )
        return made

    return checked
