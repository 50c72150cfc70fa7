"""What the models of a `model_type` of transformers have, beside the sizes that their configs say.

`DEFAULTS` has the fields that a config may leave out, as transformers 5.24.0 fills them in. A test compares both, and
the parameters that follow, with transformers itself.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from optpipe.transformer.presets import read_data

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


FAMILIES = {kind: Family(**flags) for kind, flags in read_data("families.json").items()}
# Models of text and more: the family of their language model, where its config does not say it.
WRAPPERS = {"gemma3": "gemma3_text", "llava": "llama", "mistral3": "mistral", "paligemma": "gemma"}
DEFAULTS: dict[str, dict[str, Any]] = read_data("defaults.json")
