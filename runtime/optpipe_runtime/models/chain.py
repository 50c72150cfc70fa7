"""A list of layers, each of which takes what the one before returns."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from optpipe.errors import InputError
from optpipe_runtime.models.part import Part, evenly


class Layers:
    """A `Model` of layers, by name."""

    def __init__(self, named: Iterable[tuple[str, nn.Module]]) -> None:
        self._named = list(named)
        self._accepted = {name: _accepted(layer) for name, layer in self._named}

    @property
    def layers(self) -> int:
        return len(self._named)

    def even(self, stages: int) -> list[int]:
        return evenly(self.layers, stages)

    def part(self, first: int, end: int) -> Part:
        return Chain(dict(self._named[first:end]), self._accepted)

    def require_equal(self, counts: Sequence[int]) -> None:
        """A list has no forward of its own."""


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
