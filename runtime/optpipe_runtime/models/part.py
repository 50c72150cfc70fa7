"""What models have in common that can be cut: `Model`, and `Part`, a stage of one. `Layers`: a list of layers, each of
which takes what the one before returns."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from optpipe.errors import InputError


class Part(nn.Module):
    """A stage. The names of its parameters and buffers are those in the whole model behind `prefix`. `whole_names` are
    those in the whole model, of a parameter with several the first. `shared` names the parameters here that other ranks
    have, too, by their names in the whole: a `Pipeline` ties them."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self.prefix = prefix
        self.whole_names: dict[str, str] = {}
        self.shared: dict[str, str] = {}


class Model(ABC):
    """A model that can be cut between any two of its `layers`. Embedding and head of a language model count as such."""

    def __init__(self, layers: int) -> None:
        self.layers = layers

    def even(self, stages: int) -> list[int]:
        """How many layers each of `stages` stages gets by default."""
        return evenly(self.layers, stages)

    @abstractmethod
    def part(self, first: int, end: int) -> Part:
        """The stage of the layers from `first` to before `end`. It shares their parameters with the model."""

    def require_equal(self, counts: Sequence[int]) -> None:  # noqa: B027
        """Raises `InputError` unless stages of so many layers are, in a row, the model. A list of layers has no forward
        of its own, so they always are."""


def evenly(layers: int, stages: int) -> list[int]:
    """So many layers for each stage that none has more than one more than another."""
    cuts = [round(layers * k / stages) for k in range(stages + 1)]
    return [b - a for a, b in pairwise(cuts)]


def shared_parameters(stages: Mapping[int, nn.Module]) -> dict[str, nn.Parameter]:
    """Those of this rank's stages that other ranks have, too, by name in the whole model."""
    return {key: part.get_parameter(name) for part in _parts(stages) for key, name in part.shared.items()}


def as_whole(stages: Mapping[int, nn.Module]) -> nn.Module:
    """The parameters and buffers of this rank's stages, made by `stages_of`, in one module, by their names in the whole
    model. These depend neither on the placement nor on where the model is cut, so what is saved by them can be loaded
    into any other stages of the model."""
    root = nn.Module()
    for part in _parts(stages):
        for name in part.state_dict(keep_vars=True):
            *path, last = part.whole_names.get(name, name.removeprefix(part.prefix)).split(".")
            owner = root
            for step in path:
                if step not in dict(owner.named_children()):
                    owner.add_module(step, nn.Module())
                owner = owner.get_submodule(step)
            if name in part.whole_names:
                owner.register_parameter(last, part.get_parameter(name))
            else:
                owner.register_buffer(last, part.get_buffer(name))
    return root


def _parts(stages: Mapping[int, nn.Module]) -> list[Part]:
    return [part for stage in stages.values() for part in stage.modules() if isinstance(part, Part)]


class Layers(Model):
    def __init__(self, named: Iterable[tuple[str, nn.Module]]) -> None:
        self._named = list(named)
        super().__init__(len(self._named))
        self._accepted = {name: _accepted(layer) for name, layer in self._named}

    def part(self, first: int, end: int) -> Part:
        return Chain(dict(self._named[first:end]), self._accepted)


class Chain(Part):
    """Some of the layers, by their names in the whole. A value that is a tuple is passed from layer to layer as one, as
    in nn.Sequential. Each layer gets the named arguments that its forward takes."""

    def __init__(self, layers: Mapping[str, nn.Module], accepted: Mapping[str, frozenset[str] | None]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._names = list(layers)
        self._accepted = [accepted[name] for name in layers]
        self._everywhere = None if None in accepted.values() else frozenset().union(*filter(None, accepted.values()))

    def forward(self, *values: Any, **kwargs: Any) -> Any:
        if self._everywhere is not None and not self._everywhere.issuperset(kwargs):
            unknown = min(kwargs.keys() - self._everywhere)
            raise InputError(f"kwargs has {unknown!r}: no layer of the model takes it")
        value: Any = values[0] if len(values) == 1 else values
        for name, accepted in zip(self._names, self._accepted, strict=True):
            named = kwargs if accepted is None else {k: v for k, v in kwargs.items() if k in accepted}
            value = getattr(self, name)(value, **named)
        return value


def _accepted(layer: nn.Module) -> frozenset[str] | None:
    """The names of the arguments of a layer's forward beside the first; None for all."""
    others = list(inspect.signature(layer.forward).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in others):
        return None
    return frozenset(parameter.name for parameter in others if parameter.kind is not parameter.VAR_POSITIONAL)
