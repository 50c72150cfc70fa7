"""What models have in common that can be cut: `Model`, and `Part`, a stage of one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Protocol

from torch import nn


class Part(nn.Module):
    """A stage. `shared` names the parameters here that other ranks have, too, by a key that is the same on all ranks:
    a `Pipeline` ties them."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: dict[str, str] = {}


class Model(Protocol):
    """A model that can be cut between any two of its layers. Embedding and head of a language model count as layers."""

    @property
    def layers(self) -> int:
        """How many there are."""

    def even(self, stages: int) -> list[int]:
        """How many layers each of `stages` stages gets if nothing is known of their times."""

    def part(self, first: int, end: int) -> Part:
        """The stage of the layers from `first` to before `end`. It shares their parameters with the model."""


def evenly(layers: int, stages: int) -> list[int]:
    """So many layers for each stage that none has more than one more than another."""
    cuts = [round(layers * k / stages) for k in range(stages + 1)]
    return [b - a for a, b in pairwise(cuts)]


def shared_parameters(stages: Mapping[int, nn.Module]) -> dict[str, nn.Parameter]:
    """Those of this rank's stages that other ranks have, too, by a key that is the same on all ranks."""
    found: dict[str, nn.Parameter] = {}
    for stage in stages.values():
        for part in stage.modules():
            if isinstance(part, Part):
                found |= {key: part.get_parameter(name) for key, name in part.shared.items()}
    return found
