"""What the models of a `model_type` of transformers have, beside the sizes that their configs say.

`DEFAULTS` has the fields that a config may leave out, as transformers 5.24.0 fills them in. A test compares both, and
the parameters that follow, with transformers itself.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, Literal, NamedTuple

Flag = bool | str


class Family(NamedTuple):
    """What a family's layers have. A flag that is a string is the name of the config's field that says it.

    Attributes
    ----------
    gated
        An MLP has two matrices up.
    norms, norm_bias, affine, final_norm
        How many norms of the width of the model a layer has, whether they have a bias, whether they have numbers at
        all, and whether there is one before the head.
    qkv_bias, out_bias, mlp_bias, head_bias
        The linear layers with a bias.
    qk_norm, qk_normed, qk_norm_bias
        What the norms of queries and keys have numbers for: a head's width, or the width of all heads; whether there
        are any, and whether they have a bias.
    embedding_norm
        A norm behind the embedding.
    positions
        None without learned positions, else how many there are beyond those that the config says.
    sliding
        Which layers have the config's sliding window: all, all but every n-th, in qwen2 those from `max_window_layers`
        on, in qwen2_moe every other one before it. 0: none.
    shared_gate, expert_bias, sinks
        A gate of the shared expert, biases in router and experts, one number for each head.
    grouped
        Whether configs may say how many heads keys and values have, and how wide a head is.
    """

    gated: bool = True
    norms: int = 2
    norm_bias: bool = False
    affine: Flag = True
    final_norm: Flag = True
    qkv_bias: Flag = False
    out_bias: Flag = False
    mlp_bias: Flag = False
    head_bias: bool = False
    qk_norm: Literal["", "head", "heads"] = ""
    qk_normed: Flag = True
    qk_norm_bias: bool = False
    embedding_norm: bool = False
    positions: int | None = None
    sliding: Literal["all", "late", "early"] | int = 0
    shared_gate: bool = False
    expert_bias: bool = False
    sinks: bool = False
    grouped: bool = True


LLAMA = Family(qkv_bias="attention_bias", out_bias="attention_bias")
GPT2 = Family(gated=False, norm_bias=True, qkv_bias=True, out_bias=True, mlp_bias=True, positions=0, grouped=False)

FAMILIES: dict[str, Family] = {
    "bloom": GPT2._replace(embedding_norm=True, positions=None),
    "cohere": LLAMA._replace(norms=1, qk_norm="heads", qk_normed="use_qk_norm"),
    "cohere2": LLAMA._replace(norms=1, sliding=4),
    "deepseek_v2": LLAMA._replace(mlp_bias="mlp_bias"),
    "deepseek_v3": LLAMA,
    "ernie4_5": Family(qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias"),
    "gemma": LLAMA,
    "gemma2": LLAMA._replace(norms=4, sliding=2),
    "gemma3_text": LLAMA._replace(norms=4, qk_norm="head", sliding=6),
    "glm": Family(qkv_bias="attention_bias"),
    "glm4": Family(norms=4, qkv_bias="attention_bias"),
    "glm4_moe": Family(qkv_bias="attention_bias", qk_norm="head", qk_normed="use_qk_norm"),
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "gpt_neox": GPT2._replace(qkv_bias="attention_bias", out_bias="attention_bias", positions=None),
    "gpt_oss": LLAMA._replace(sliding=2, expert_bias=True, sinks=True),
    "granite": LLAMA._replace(mlp_bias="mlp_bias"),
    "granitemoe": LLAMA,
    "llama": LLAMA._replace(mlp_bias="mlp_bias"),
    "ministral3": Family(sliding="all"),
    "mistral": Family(sliding="all"),
    "mixtral": Family(sliding="all"),
    "olmo": LLAMA._replace(norms=0, final_norm=False),
    "olmo2": LLAMA._replace(qk_norm="heads"),
    "olmo3": LLAMA._replace(qk_norm="heads", sliding=4),
    "opt": GPT2._replace(
        affine="layer_norm_elementwise_affine",
        final_norm="do_layer_norm_before",
        qkv_bias="enable_bias",
        out_bias="enable_bias",
        mlp_bias="enable_bias",
        positions=2,
    ),
    "phi": GPT2._replace(
        norms=1,
        head_bias=True,
        qk_norm="head",
        qk_normed="qk_layernorm",
        qk_norm_bias=True,
        positions=None,
        grouped=True,
    ),
    "phi3": Family(sliding="all"),
    "qwen2": Family(qkv_bias=True, sliding="late"),
    "qwen2_moe": Family(qkv_bias="qkv_bias", sliding="early", shared_gate=True),
    "qwen3": LLAMA._replace(qk_norm="head", sliding="late"),
    "qwen3_moe": LLAMA._replace(qk_norm="head", sliding="all"),
    "seed_oss": Family(qkv_bias="attention_bias", out_bias="attention_out_bias", mlp_bias="mlp_bias"),
    "starcoder2": GPT2._replace(
        qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", positions=None, grouped=True, sliding="all"
    ),
}
# Models of text and more: the family of their language model, where its config does not say it.
WRAPPERS = {"gemma3": "gemma3_text", "llava": "llama", "mistral3": "mistral", "paligemma": "gemma"}
DEFAULTS: dict[str, dict[str, Any]] = json.loads(
    resources.files("optpipe.transformer").joinpath("defaults.json").read_text(encoding="utf-8")
)
