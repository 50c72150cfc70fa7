"""Configs of every type that is read: their parameters, windows and defaults are those of transformers itself.

`make stacks ARGS=transformers-5.24.0` runs it.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from optpipe.errors import InputError
from optpipe.transformer.estimate import estimate
from optpipe.transformer.families import DEFAULTS, FAMILIES, WRAPPERS
from optpipe.transformer.huggingface import read
from optpipe.transformer.presets import GPUS
from optpipe.transformer.records import Parallelism, Run

pytestmark = pytest.mark.stacks
# Small sizes that no default has, in the names of whichever family has them.
SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd"), 48),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 112),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 7),
    **dict.fromkeys(("num_attention_heads", "n_head"), 6),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 40),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 5),
    "num_key_value_heads": 3,
    "vocab_size": 96,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "max_window_layers": 3,
    "sliding_window": 10,
    "pad_token_id": 0,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
# What is changed of these, one at a time; None: it is null.
CHANGES: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (6, 1, None),
    "head_dim": (10, None),
    "q_lora_rank": (None,),
    "n_inner": (None, 50),
    "word_embed_proj_dim": (32,),
    "decoder_sparse_step": (2,),
    "first_k_dense_replace": (2, 0),
    "n_shared_experts": (2, 0),
    "sliding_window": (None,),
    "layer_types": (["full_attention", "sliding_attention"] * 3 + ["full_attention"],),
    "mlp_only_layers": ([1],),
}


def fields_of(kind: str) -> dict[str, Any]:
    """The fields of transformers' config and their defaults."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[kind])}


def counted(config: dict[str, Any]) -> tuple[int, list[int]]:
    """The parameters, and the window of each layer, as we read them."""
    shape = read(json.dumps(config))
    found = estimate(shape, Parallelism(), GPUS["H100"], Run(microbatches=1, sequence=8))
    return found.parameters, [shape.window_of(i) for i in range(shape.layers)]


def theirs(config: dict[str, Any]) -> tuple[int, list[int]]:
    """The same of the model that transformers makes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    window = getattr(made, "sliding_window", None) or 0
    if getattr(made, "use_bidirectional_attention", False):  # this is half of it, on each side
        window = 2 * (window - 1)
    kinds = getattr(made, "layer_types", None) or ["sliding_attention"] * made.num_hidden_layers
    windows = [window if kind == "sliding_attention" else 0 for kind in kinds]
    return sum(parameter.numel() for parameter in model.parameters()), windows


@pytest.mark.parametrize("kind", FAMILIES)
def test_parameters_and_windows_are_those_of_transformers(kind: str) -> None:
    """With sizes of our own and all other fields left out; and with each flag turned, and each size changed."""
    fields = fields_of(kind)
    small = {"model_type": kind} | {name: size for name, size in SIZES.items() if name in fields}
    flags = [{name: not default} for name, default in fields.items() if isinstance(default, bool)]
    flags += [{"use_sliding_window": True, **sizes} for sizes in ({}, {"max_window_layers": 0})]
    changed = [{name: value} for name, values in CHANGES.items() for value in values if name in fields]
    compared, refused = 0, []
    others = ({"head_dim": 10}, {"num_key_value_heads": 2})  # also where they are not read
    for change in ({}, *flags, *changed, *others):
        if change not in others and not change.keys() <= fields.keys():
            continue
        try:
            expected = theirs(small | change)
        except Exception:  # they make no such model
            assert change
            continue
        try:
            assert counted(small | change) == expected, change
            compared += 1
        except InputError as error:
            refused.append(str(error))
    assert compared >= len(flags) / 2
    assert all("not modelled" in sentence for sentence in refused), refused


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_a_config_leaves_out_is_as_transformers_fills_it_in(kind: str) -> None:
    fields = fields_of(kind)
    assert {name: fields[name] for name in DEFAULTS[kind]} == DEFAULTS[kind]
    layers = {name: 4 for name in ("num_hidden_layers", "n_layer") if name in fields}
    experts = {"num_experts_per_tok": 2} if kind == "deepseek_v2" else {}  # transformers has no default
    config = {"model_type": kind} | layers | experts
    assert counted(config) == theirs(config)


@pytest.mark.parametrize("inner", [None, False, True])
@pytest.mark.parametrize("outer", [None, False, True])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_the_language_model_of_a_model_of_images(kind: str, outer: bool | None, inner: bool | None) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    def tied(value: bool | None) -> dict[str, bool]:
        return {} if value is None else {"tie_word_embeddings": value}

    text = {name: size for name, size in SIZES.items() if name in fields_of(WRAPPERS[kind])}
    config = {"model_type": kind, "text_config": text | tied(inner), **tied(outer)}
    made = AutoConfig.for_model(**json.loads(json.dumps(config)))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(made)
    ours = ("language_model", "lm_head")
    expected = sum(p.numel() for name, p in model.named_parameters() if any(part in name for part in ours))
    assert counted(config)[0] == expected
