"""A causal language model of transformers, by its `config.json`: cut evenly, one stage a rank, with random weights.

The model is made without memory, on the `meta` device; a rank then gets its own stage only. Nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from optpipe.errors import InputError, did_you_mean
from optpipe.files import parse_json, read_text
from optpipe_runtime.factory.setup import Factory, Setup, Sizes, here, language_model, needed
from optpipe_runtime.models.stages import stages_of
from optpipe_runtime.torch_private.modules import buffers_of, parameters_of


def of_config(path: str, sizes: Sizes) -> Factory:
    """The model of a config. Sequences are as long as `max_position_embeddings` says, unless `sizes` has a length; the
    type of the parameters is the config's.

    Raises
    ------
    InputError
        If the file cannot be read, transformers is not installed or has no such model, or the model is no causal
        language model. The factory raises it if the model cannot be cut.
    """
    transformers, config = needed("transformers", path), _config(path)
    sizes = sizes._replace(sequence=sizes.sequence or getattr(config, "max_position_embeddings", None))
    if not sizes.sequence:
        raise InputError(f"sequence is missing: {path} has no max_position_embeddings")

    def factory(rank: int, ranks: int) -> Setup:
        with torch.device("meta"):
            model = _made(path, lambda: transformers.AutoModelForCausalLM.from_config(config))
        stage: Any = stages_of(model, range(ranks), rank=rank)[rank]
        _place(stage, here())
        stage.model.initialize_weights()
        vocabulary = model.config.vocab_size

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            value: Tensor = model.loss_function(logits, labels, vocabulary)
            return value

        return language_model(stage, rank, ranks, loss, vocabulary, sizes, type(model).__name__)

    return factory


def _config(path: str) -> Any:
    """The config as transformers reads it; of a model of several kinds of data, that of its text."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    fields = parse_json(read_text(path), path)
    if isinstance(fields, dict):
        fields = fields.get("text_config", fields)
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if not isinstance(kind, str):
        raise InputError(f"{path}: an object with fields such as model_type is expected")
    if kind not in CONFIG_MAPPING:
        near = did_you_mean(kind, list(CONFIG_MAPPING.keys()), "; ")
        raise InputError(f"{path}: model_type = {kind!r}: transformers has no such model{near}")
    if CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(f"{path}: model_type = {kind!r}: transformers has no causal language model of it")
    return _made(path, lambda: CONFIG_MAPPING[kind].from_dict(fields))


def _made(path: str, make: Any) -> Any:
    """What transformers makes of the config. What it raises about one becomes a sentence."""
    try:
        return make()
    except Exception as error:
        told = " ".join(str(error).split())
        raise InputError(f"{path}: transformers does not make a model of it: {told[:300]}") from None


def _place(stage: nn.Module, device: torch.device) -> None:
    """Gives a stage on the `meta` device memory of its own. A parameter that it uses twice stays one parameter."""
    placed: dict[Tensor, Tensor] = {}
    for part in stage.modules():
        for table in (parameters_of(part), buffers_of(part)):
            for name, tensor in table.items():
                if tensor is not None and tensor not in placed:
                    zeros = torch.zeros_like(tensor, device=device)
                    trained = isinstance(tensor, nn.Parameter)
                    placed[tensor] = nn.Parameter(zeros, tensor.requires_grad) if trained else zeros
                if tensor is not None:
                    table[name] = placed[tensor]  # type: ignore[assignment]
