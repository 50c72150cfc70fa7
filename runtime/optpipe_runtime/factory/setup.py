"""`Setup`: what `optpipe profile` measures on one rank.

# model.py, for `optpipe profile --model model:factory --ranks 2 --microbatches 8`
def factory(rank: int, ranks: int) -> Setup:
    placement = list(range(ranks))
    return Setup({rank: make_stage(rank)}, placement, F.cross_entropy, *first_batch(), {"full_duplex": True})
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
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
    name
        The name of the problem.
    """

    stages: Mapping[int, nn.Module]
    placement: Sequence[int]
    loss_fn: LossFn
    inputs: Any
    targets: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    kwargs: Mapping[Any, Any] = field(default_factory=dict)
    name: str = ""

    def pipeline(self, microbatches: int) -> Pipeline:
        """Makes the pipeline. Collective. Raises `InputError` for an unknown option."""
        names = [name for name in inspect.signature(Pipeline).parameters if name not in REQUIRED]
        for name in self.options:
            if name not in names:
                raise InputError(f"options has {name!r}: must be one of {', '.join(names)}")
        return Pipeline(self.stages, self.placement, self.loss_fn, microbatches, **self.options)


Factory = Callable[[int, int], Setup]  # of a rank and the number of ranks


class Sizes(NamedTuple):
    """What a batch of a language model is made of: micro-batches, sequences of a micro-batch, and tokens of a sequence.
    None: as the model's config has it."""

    microbatches: int
    microbatch_size: int | None = None
    sequence: int | None = None


def language_model(
    stage: nn.Module, rank: int, ranks: int, loss_fn: LossFn, vocabulary: int, sizes: Sizes, name: str, **kwargs: Any
) -> Setup:
    """One stage a rank, and a batch of random tokens. A size that is None counts as 1.

    Parameters
    ----------
    stage
        On the rank's device.
    loss_fn
        Of logits and tokens.
    vocabulary
        How many different tokens there are.
    name
        Of the model.
    kwargs
        Named arguments of the stage.
    """
    count, each, sequence = sizes
    shape = (count * (each or 1), sequence or 1)
    tokens = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(here())
    told = f"{name}, {shape[0] // count} x {shape[1]} tokens a micro-batch"
    return Setup({rank: stage.train()}, range(ranks), loss_fn, tokens, tokens, kwargs=kwargs, name=told[:200])


def here() -> torch.device:
    """This rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def needed(module: str, what: str) -> Any:
    """A module of a package that only some models need. Raises `InputError` if it is not installed."""
    package = module.partition(".")[0]
    try:
        importlib.import_module(package)
        return importlib.import_module(module)
    except ImportError as error:
        if error.name == package:
            raise InputError(f"{what}: {package} is not installed: pip install {package}") from None
        raise InputError(f"{what}: {module} cannot be imported: {error}") from None
