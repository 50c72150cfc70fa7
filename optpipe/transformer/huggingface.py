"""Reads the shape of a transformer from a Hugging Face `config.json`, as plain JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from optpipe.errors import InputError, did_you_mean, shown
from optpipe.files import parse_json
from optpipe.transformer.families import DEFAULTS, FAMILIES, WRAPPERS, Family, Flag
from optpipe.transformer.records import Transformer, Vectors

# What configs call each figure, the usual name first.
LAYERS, HIDDEN = ("num_hidden_layers", "n_layer", "num_layers"), ("hidden_size", "n_embd", "d_model")
HEADS, VOCABULARY = ("num_attention_heads", "n_head"), ("vocab_size",)
FFN, POSITIONS = ("intermediate_size", "ffn_dim", "n_inner"), ("max_position_embeddings", "n_positions")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
MTP = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_num_hidden_layers")
DROPOUT = ("resid_pdrop", "hidden_dropout", "dropout", "residual_dropout")
UNMODELLED = ("mlp_only_layers", "add_cross_attention", "is_encoder_decoder")
NO_PARTS = ("quantization_config", "generation_config", "compression_config", "text_config")
HEADED = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # of architectures that give logits of tokens


def read(text: str | bytes, what: str = "config") -> Transformer:
    """The shape that a `config.json` describes; what it leaves out is as transformers has it (`families`).

    `sequence` stays None, since a config says how long sequences may be, not how long they are in training.

    Raises
    ------
    InputError
        If the text is not JSON, a figure is wrong, or the model is of a type that is not known or not modelled.
    """
    whole = parse_json(text, what)
    if not isinstance(whole, dict):
        raise InputError(f"{what}: a config is an object with fields such as hidden_size")
    kind, given = _language_model(whole, what)
    config = _Config(kind, given, what)
    heads, hidden = config.number(*HEADS), config.number(*HIDDEN)
    family = FAMILIES[kind]
    for name in UNMODELLED:
        if given.get(name):
            raise InputError(f"{what}: {name} = {shown(given[name])}: models with it are not modelled")
    fields: dict[str, Any] = {
        "layers": config.number(*LAYERS),
        "hidden": hidden,
        "heads": heads,
        "vocabulary": config.number(*VOCABULARY),
        "name": _shown(whole.get("_name_or_path") or whole.get("model_type") or kind),
        "source": what[:500],
        "ffn": config.number(*FFN, otherwise=4 * hidden),
        **_heads(config, family, hidden, heads),
        "gated": family.gated,
        "tied": _tied(whole, config),
        "dropout": any(config.value(name) for name in DROPOUT),
        "embedding_width": config.number("word_embed_proj_dim", otherwise=0) or None,
        "causal": not config.value("use_bidirectional_attention"),
        "left_out": tuple(_left_out(whole, given)),
        **_latents(config),
        **_experts(config),
    }
    if family.positions is not None:
        fields["positions"] = config.number(*POSITIONS) + family.positions
    shape = Transformer.from_dict(fields, what)
    more = {"vectors": _vectors(config, family, shape), **_window(config, family, shape.layers)}
    return Transformer.from_dict(shape.model_dump() | more, what)


def _language_model(whole: dict[str, Any], what: str) -> tuple[str, dict[str, Any]]:
    """The family of the model, or of its language model, and that one's fields."""
    of_text = WRAPPERS.get(str(whole.get("model_type")))
    inner = whole.get("text_config", {} if of_text else whole)
    if not isinstance(inner, dict):
        raise InputError(
            f"{what}: text_config = {shown(inner)}: an object with fields such as hidden_size was expected"
        )
    kind = inner.get("model_type", of_text)
    if not isinstance(kind, str) or kind not in FAMILIES:
        types = sorted({*FAMILIES, *WRAPPERS})
        near = did_you_mean(str(kind), types, "; ")
        raise InputError(
            f"{what}: model_type = {shown(kind)}: only {', '.join(types)} are known{near}; a file with the fields of a "
            "transformer does without"
        )
    return kind, inner


@dataclass(frozen=True)
class _Config:
    """A config's fields; those that it leaves out are as transformers fills them in."""

    kind: str
    given: dict[str, Any]
    what: str

    def value(self, *names: str) -> Any:
        """The first of the names that is given, or has a default; None if none is."""
        filled_in = DEFAULTS[self.kind]
        for fields in (self.given, filled_in):
            for name in names:
                if name in fields:
                    return fields[name]
        return None

    def number(self, *names: str, otherwise: int | None = None) -> int:
        """The whole number of these names; `otherwise` where it is null or not there.

        Raises InputError if it is no whole number, or if there is none.
        """
        value = self.value(*names)
        if value is None and otherwise is not None:
            return otherwise
        if value is None:
            raise InputError(f"{self.what}: {names[0]} is missing")
        if not isinstance(value, int) or isinstance(value, bool):
            name = next((name for name in names if name in self.given), names[0])
            raise InputError(f"{self.what}: {name} = {shown(value)}: must be a whole number")
        return value

    def has(self, flag: Flag) -> bool:
        """Whether the family has it, or the field of this name says so."""
        return bool(self.value(flag)) if isinstance(flag, str) else flag


def _heads(config: _Config, family: Family, hidden: int, heads: int) -> dict[str, Any]:
    """The heads of keys and values, and the width of a head where it does not follow from that of the model."""
    if not family.grouped:
        return {"query_groups": 1 if config.has("multi_query") else heads}
    rounded = hidden // heads if heads > 0 and hidden % heads else None
    return {
        "query_groups": config.number("num_key_value_heads", otherwise=heads),
        "head_size": config.number("head_dim", otherwise=0) or rounded,
    }


def _tied(whole: dict[str, Any], config: _Config) -> bool:
    """Whether embedding and head are tied. Of a model of text and more, its own config says it, not that of its text,
    where transformers has a default for the whole."""
    name, filled_in = "tie_word_embeddings", DEFAULTS.get(str(whole.get("model_type")), {})
    if name in filled_in:
        return bool({**filled_in, **whole}[name])
    return bool(whole.get(name) or config.value(name))


def _left_out(whole: dict[str, Any], given: dict[str, Any]) -> Iterator[str]:
    """The parts of the model that a `Transformer` does not have."""
    if whole is not given and (outer := whole.get("model_type")) not in (None, *WRAPPERS):
        yield f"what {_shown(outer)} adds to its language model"
    for name, value in whole.items():
        if name.endswith("_config") and name not in NO_PARTS and isinstance(value, dict):
            yield f"{_shown(name)} ({_shown(value.get('model_type') or name.removesuffix('_config'))})"
    for name in MTP:
        if given.get(name):
            yield f"{name} = {_shown(given[name])} (multi-token prediction)"
    architectures = whole.get("architectures")
    for name in architectures if isinstance(architectures, list) else ():
        if not str(name).endswith(HEADED):
            yield f"the head of {_shown(name)}: that of a causal language model is taken"


def _shown(value: object) -> str:
    """The text of a value for a sentence: short, and without characters that a terminal obeys."""
    return repr(str(value)[:100])[1:-1][:200]


def _window(config: _Config, family: Family, layers: int) -> dict[str, Any]:
    """The sliding window, and the layers without it."""
    window = config.number("sliding_window", otherwise=0)
    if not (family.sliding and window) or config.value("use_sliding_window") is False:
        return {}
    full = tuple(i for i, slides in enumerate(_slides(config, family, layers)) if not slides)
    return {"window": window, "full_layers": full} if len(full) < layers else {}


def _slides(config: _Config, family: Family, layers: int) -> list[bool]:
    """Of each layer whether it has the window. Raises InputError if a layer has attention of another kind."""
    kinds, rule = config.value("layer_types"), family.sliding
    if rule == "all":
        return [True] * layers
    if isinstance(kinds, list):
        if other := [kind for kind in kinds if kind not in ("sliding_attention", "full_attention")]:
            raise InputError(
                f"{config.what}: layer_types has {shown(other[0])}: it is not modelled, sliding and full are"
            )
        return [kind == "sliding_attention" for kind in kinds[:layers]]
    if isinstance(rule, int):
        pattern = config.number("sliding_window_pattern", otherwise=rule)
        return [pattern < 1 or (i + 1) % pattern > 0 for i in range(layers)]
    border = config.number("max_window_layers")
    return [i >= border if rule == "late" else i < border and i % 2 == 0 for i in range(layers)]


def _latents(config: _Config) -> dict[str, Any]:
    """The fields of multi-head latent attention, whose heads all have keys of their own."""
    if "kv_lora_rank" not in DEFAULTS[config.kind]:
        return {}
    return {
        "query_groups": None,
        "kv_latent": config.number("kv_lora_rank"),
        "query_latent": config.number("q_lora_rank", otherwise=0),
        "head_size": config.number("qk_nope_head_dim"),
        "rope_size": config.number("qk_rope_head_dim"),
        "value_size": config.number("v_head_dim"),
    }


def _experts(config: _Config) -> dict[str, Any]:
    if not DEFAULTS[config.kind].keys() & {*EXPERTS}:
        return {}
    if (every := config.number("moe_layer_freq", otherwise=1)) != 1:
        raise InputError(f"{config.what}: moe_layer_freq = {every}: only experts in every layer are modelled")
    width = config.number("moe_intermediate_size", *FFN)
    shared = config.number("n_shared_experts", otherwise=0) * width
    return {
        "experts": config.number(*EXPERTS),
        "experts_per_token": config.number("num_experts_per_tok"),
        "expert_ffn": width,
        "shared_ffn": config.number("shared_expert_intermediate_size", otherwise=shared),
        "dense_layers": config.number("first_k_dense_replace", otherwise=0),
        "expert_every": config.number("decoder_sparse_step", otherwise=1),
    }


def _vectors(config: _Config, family: Family, shape: Transformer) -> Vectors:
    """What the model's norms and biases have."""
    hidden, up = shape.hidden, shape.up_matrices
    norm = hidden * (1 + family.norm_bias) if config.has(family.affine) else 0
    inside = shape.query_width + 2 * shape.key_width
    if shape.kv_latent:  # what goes down to latent vectors has biases, what goes up has none
        inside = shape.query_latent + shape.kv_latent + shape.rope_size
    normed = {"": 0, "head": 2 * shape.query_width // shape.heads, "heads": shape.query_width + shape.key_width}
    mlp_bias = config.has(family.mlp_bias)
    ends_in_norm = config.has(family.final_norm) and not config.value("_remove_final_layer_norm")
    return Vectors(
        layer=family.norms * norm
        + config.has(family.qkv_bias) * inside
        + config.has(family.out_bias) * hidden
        + config.has(family.qk_normed) * normed[family.qk_norm] * (1 + family.qk_norm_bias)
        + family.sinks * shape.heads,
        mlp=mlp_bias * (up * shape.ffn + hidden),
        router=family.shared_gate * hidden
        + family.expert_bias * shape.experts
        + (mlp_bias * (up * shape.shared_ffn + hidden) if shape.shared_ffn else 0),
        expert=family.expert_bias * (up * shape.expert_ffn + hidden),
        embedding=norm if family.embedding_norm else 0,
        head=norm * ends_in_norm + family.head_bias * shape.vocabulary,
    )
