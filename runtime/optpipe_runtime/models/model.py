"""`Model`, which can be cut, and `Part`, a stage of one. Models are `Layers`, each of which takes what the one before
returns, and `CausalLM`, a causal language model of transformers (Llama, Qwen3, Mixtral and those that are built alike).
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn

from optpipe.errors import InputError
from optpipe_runtime.models.proof import require_equal

DECODER = ("embed_tokens", "layers", "norm")  # what has parameters beside the head of a causal language model


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


class CausalLM(Model):
    """Its embedding, its decoder layers, and its norm with the head count as layers.

    A stage is a copy of the model's own objects with the layers that are not here left out, so the model's own forward
    makes rotary embeddings, masks and position ids, in each stage for itself. The parameters are those of the model and
    keep its names.
    """

    def __init__(self, model: Any) -> None:
        """Raises `InputError` if the model is built in another way."""
        self._model, self._kind = model, type(model).__name__
        decoder: Any = getattr(model, "base_model", None)
        children = dict(decoder.named_children()) if isinstance(decoder, nn.Module) else {}
        missing = [name for name in DECODER if name not in children]
        if missing or decoder is model or not isinstance(children["layers"], nn.ModuleList):
            raise InputError(
                f"model is a {self._kind}: a causal language model of transformers needs a decoder with "
                f"{', '.join(DECODER)}; give a list of its layers, or cut it by torch's SplitPoint"
            )
        for name, _ in decoder.named_parameters(remove_duplicate=False):
            if (child := name.split(".")[0]) not in DECODER:
                what = "has parameters" if child in children else "is a parameter"
                raise InputError(f"model is a {self._kind}: its {child} {what} outside of its layers, of no stage")
        if getattr(getattr(model, "config", None), "output_router_logits", False):
            raise InputError(
                f"model is a {self._kind} with output_router_logits: its loss needs the routers of all layers, which "
                "are in different stages; set config.output_router_logits = False"
            )
        self._decoder, self._count = decoder, len(children["layers"])
        super().__init__(self._count + 2)

    def even(self, stages: int) -> list[int]:
        """Decoder layers evenly, embedding and head to the first and to the last stage."""
        if stages == 1 or stages > self._count:
            return evenly(self.layers, stages)
        counts = evenly(self._count, stages)
        return [counts[0] + 1, *counts[1:-1], counts[-1] + 1]

    def part(self, first: int, end: int) -> Part:
        # Left-out decoder layers hand on what they get, so that the others keep their numbers.
        decoder, model = _shallow(self._decoder), _shallow(self._model)
        kept = range(first - 1, end - 1)
        decoder.layers = nn.ModuleList(
            layer if i in kept else _Skipped(layer) for i, layer in enumerate(self._decoder.layers)
        )
        if first > 0:
            decoder.embed_tokens = None
        if end < self.layers:
            decoder.norm = nn.Identity()
            for name, child in (*model.named_children(), *model.named_parameters(recurse=False)):
                if child is not self._decoder:
                    setattr(model, name, None)
        setattr(model, model.base_model_prefix, decoder)
        return _Stage(model, first == 0, end == self.layers)

    def require_equal(self, counts: Sequence[int]) -> None:
        require_equal(self._model, lambda small: CausalLM(small).row(counts))

    def row(self, counts: Sequence[int]) -> list[Part]:
        """Stages of so many layers."""
        return [self.part(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]


class _Stage(Part):
    """`model` is the model with this stage's layers."""

    def __init__(self, model: Any, begins: bool, ends: bool) -> None:
        super().__init__("model.")
        self.model, self._ends = model, ends
        self._given = "input_ids" if begins else "inputs_embeds"

    def forward(self, value: Tensor, **kwargs: Any) -> Tensor:
        """The hidden states behind this stage's layers, or the logits."""
        called = self.model if self._ends else self.model.base_model
        output: Any = called(**{self._given: value}, use_cache=False, **kwargs)
        result: Tensor = output.logits if self._ends else output.last_hidden_state
        return result


class _Skipped(nn.Module):
    """In the place of another stage's layer, with its marks, such as `attention_type`, by which a forward chooses."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        marks = {name: value for name, value in vars(layer).items() if isinstance(value, str | int | float)}
        vars(self).update(marks | vars(self))

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


def _shallow(module: Any) -> Any:
    """A copy with the same parts, which can be replaced in it."""
    shallow = copy.copy(module)
    vars(shallow).update({name: copy.copy(value) for name, value in vars(module).items() if isinstance(value, Mapping)})
    return shallow
