"""Reads the shape of a transformer from a Hugging Face `config.json`, as plain JSON."""

from __future__ import annotations

import json
from typing import Any

from optpipe.errors import InputError, did_you_mean
from optpipe.transformer.records import Transformer

GATED = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
    *("olmo", "olmo2", "phi3", "cohere", "granite", "glm4", "deepseek", "deepseek_v2", "deepseek_v3"),
)
UNGATED = ("gpt2", "opt", "gpt_neox", "gpt_bigcode", "bloom", "starcoder2", "phi")
TIED = ("gpt2", "opt", "bloom", "gpt_bigcode", "gemma", "gemma2", "gemma3_text")  # if the config does not say

# What configs call each figure, the usual name first.
NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
LEARNED_POSITIONS = ("gpt2", "opt", "gpt_bigcode")
DROPOUT = ("resid_pdrop", "hidden_dropout", "dropout", "residual_dropout")


def read(text: str | bytes, what: str = "config") -> Transformer:
    """The shape that a `config.json` describes.

    `sequence` stays None, since a config says how long sequences may be, not how long they are in training.

    Raises
    ------
    InputError
        If the text is not JSON, a figure is missing, or the model is of a type that is not known or not modelled.
    """
    try:
        config = json.loads(text)
    except ValueError as error:
        raise InputError(f"{what} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"{what}: a config is an object with fields such as hidden_size")
    config = config.get("text_config", config)
    kind = config.get("model_type")
    if kind not in (*GATED, *UNGATED):
        near = did_you_mean(str(kind), (*GATED, *UNGATED), "; ")
        raise InputError(
            f"{what}: model_type = {kind!r}: only {', '.join(sorted((*GATED, *UNGATED)))} are known{near}; a file with "
            "the fields of a transformer does without"
        )
    values = {name: _first(config, names, what) for name, names in NAMES.items()}
    if not isinstance(values["hidden"], int):
        raise InputError(f"{what}: {NAMES['hidden'][0]} = {values['hidden']!r}: must be a whole number")
    fields: dict[str, Any] = {
        **values,
        "name": str(config.get("_name_or_path") or kind)[:200],
        "source": what[:500],
        "ffn": config.get("intermediate_size")
        or config.get("ffn_dim")
        or config.get("n_inner")
        or 4 * values["hidden"],
        "query_groups": 1 if config.get("multi_query") else config.get("num_key_value_heads"),
        "head_size": config.get("head_dim"),
        "positions": config.get("max_position_embeddings") or config.get("n_positions") or 0
        if kind in LEARNED_POSITIONS
        else 0,
        "gated": kind in GATED,
        "tied": config.get("tie_word_embeddings", kind in TIED),
        "dropout": any(config.get(name) for name in DROPOUT),
        **_latents(config, what),
        **_experts(config, what),
    }
    return Transformer.from_dict(fields, what)


def _latents(config: dict[str, Any], what: str) -> dict[str, Any]:
    """The fields of multi-head latent attention, whose heads all have keys of their own."""
    if not config.get("kv_lora_rank"):
        return {}
    return {
        "query_groups": None,
        "kv_latent": config["kv_lora_rank"],
        "query_latent": config.get("q_lora_rank") or 0,
        "head_size": _first(config, ("qk_nope_head_dim",), what),
        "rope_size": config.get("qk_rope_head_dim") or 0,
        "value_size": _first(config, ("v_head_dim",), what),
    }


def _experts(config: dict[str, Any], what: str) -> dict[str, Any]:
    experts = next((config[name] for name in EXPERTS if config.get(name)), 0)
    if not experts:
        return {}
    if config.get("mlp_only_layers"):
        raise InputError(f"{what}: mlp_only_layers: layers without experts that are listed one by one are not modelled")
    width = config.get("moe_intermediate_size") or config.get("intermediate_size")
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * (width or 0)
    return {
        "experts": experts,
        "experts_per_token": config.get("num_experts_per_tok", 0),
        "expert_ffn": width,
        "shared_ffn": shared,
        "dense_layers": config.get("first_k_dense_replace") or 0,
        "expert_every": config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1,
    }


def _first(config: dict[str, Any], names: tuple[str, ...], what: str) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise InputError(f"{what}: {names[0]} is missing")
