"""What models have in common that can be cut: `Model`, and `Part`, a stage of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

from torch import nn


class Part(nn.Module):
    """A stage. The names of its parameters and buffers are those in the whole model behind `prefix`. `whole_names` are
    those in the whole model, of a parameter with several the first. `shared` names the parameters here that other ranks
    have, too, by their names in the whole: a `Pipeline` ties them."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self.prefix = prefix
        self.whole_names: dict[str, str] = {}
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

    def require_equal(self, counts: Sequence[int]) -> None:
        """Raises `InputError` unless stages of so many layers are, in a row, the model."""


def evenly(layers: int, stages: int) -> list[int]:
    """So many layers for each stage that none has more than one more than another."""
    cuts = [round(layers * k / stages) for k in range(stages + 1)]
    return [b - a for a, b in pairwise(cuts)]


def shared_parameters(stages: Mapping[int, nn.Module]) -> dict[str, nn.Parameter]:
    """Those of this rank's stages that other ranks have, too, by name in the whole model."""
    parameters: dict[str, nn.Parameter] = {}
    for stage in stages.values():
        for part in stage.modules():
            if isinstance(part, Part):
                parameters |= {key: part.get_parameter(name) for key, name in part.shared.items()}
    return parameters


def as_whole(stages: Mapping[int, nn.Module]) -> nn.Module:
    """The parameters and buffers of this rank's stages, made by `stages_of`, in one module, by their names in the whole
    model. These depend neither on the placement nor on where the model is cut, so what is saved by them can be loaded
    into any other stages of the model."""
    root = nn.Module()
    for stage in stages.values():
        for part in stage.modules():
            if not isinstance(part, Part):
                continue
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
