"""A causal language model of transformers (Llama, Qwen3, Mixtral and those that are built alike).

A stage is a copy of the model's own objects with the layers that are not here left out, so the model's own forward
makes rotary embeddings, masks and position ids, in each stage for itself. The parameters are those of the model and
keep its names.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from optpipe.errors import InputError
from optpipe_runtime.models.part import Model, Part, evenly
from optpipe_runtime.models.proof import require_equal

DECODER = ("embed_tokens", "layers", "norm")  # what has parameters beside the head


class CausalLM(Model):
    """Its embedding, its decoder layers, and its norm with the head count as layers."""

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
