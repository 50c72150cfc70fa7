"""All types of causal language models and sequence classifiers of transformers, cut into stages or refused: a table.

PYTHONPATH=tests .stacks/transformers-5.24.0/bin/python -m support.causal_types [TYPE...]

A model as wide as its type's default, with a few layers, stands on the `meta` device. If it is cut, so is a narrow one,
whose stages are compared with it on inputs of another kind than those of `models.proof`.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optpipe.errors import InputError
from optpipe_runtime import stages_of
from optpipe_runtime.models.proof import narrow_config

LAYERS = 8
HEADS = ("CausalLM", "SequenceClassification")
EQUAL, REFUSED, LEFT_OUT, WRONG = "equal", "refused", "left out", "WRONG"
# Fields without which transformers makes no model of the type's default config, or the model cannot run.
FIELDS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "reformer": {"is_decoder": True},
    "nemotron": {"num_key_value_heads": 8},
}
# Types that differ by what their config says: keys and values that layers share, embeddings for each layer.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4_unified_text, shared keys and values": ("gemma4_unified_text", {"num_kv_shared_layers": 2}),
    "gemma4_text, nothing for each layer": (
        "gemma4_text",
        {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    ),
    "mixtral, losses of routers": ("mixtral", {"output_router_logits": True}),
}


class Row(NamedTuple):
    """What became of a type, and why."""

    type: str
    head: str
    answer: str
    reason: str


def rows(head: str, types: Collection[str] = ()) -> Iterator[Row]:
    """One for each type that has such a head, or for those of `types`."""
    import transformers
    from transformers.models.auto import modeling_auto

    transformers.logging.set_verbosity_error()
    auto = getattr(transformers, f"AutoModelFor{head}")
    names = {
        "CausalLM": (*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS),
        "SequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    }[head]
    for name in sorted(names):
        if not types or name in types:
            kind, fields = VARIANTS.get(name, (name, FIELDS.get(name, {})))
            padding = {} if head == "CausalLM" else {"pad_token_id": 0}
            yield Row(name, head, *_answer(auto, kind, fields | padding))


def _answer(auto: Any, kind: str, fields: dict[str, Any]) -> tuple[str, str]:
    try:
        config, large = _outline(auto, kind, fields)
    except Exception as error:  # another package, or a config that must be given
        return LEFT_OUT, f"no model of its default config: {type(error).__name__}"
    try:
        _cut(large)
    except InputError as error:
        is_sentence = "\n" not in str(error) and str(error).startswith(f"model is a {type(large).__name__}")
        return REFUSED if is_sentence else WRONG, str(error)
    except Exception as error:
        return WRONG, f"{type(error).__name__}: {error}"
    torch.manual_seed(5)
    try:
        small = auto.from_config(narrow_config(config))
        stages = _cut(small)
    except Exception as error:
        return WRONG, f"cut where it is wide, but not narrow: {type(error).__name__}: {error}"
    difference = _largest_difference(small, stages)
    return (EQUAL, f"{difference:.0e}") if difference < 1e-4 else (WRONG, f"off by {difference:.0e}")


def _outline(auto: Any, kind: str, fields: dict[str, Any]) -> tuple[Any, Any]:
    """The type's config, and a model without memory: with a few layers, if the type allows to say how many."""
    from transformers import CONFIG_MAPPING

    for layers in ({"num_hidden_layers": LAYERS}, {}):
        with contextlib.suppress(Exception), torch.device("meta"):
            config = CONFIG_MAPPING[kind](**fields | layers)
            return config, auto.from_config(config)
    with torch.device("meta"):
        config = CONFIG_MAPPING[kind](**fields)
        return config, auto.from_config(config)


def _cut(model: Any) -> list[Any]:
    return list(stages_of(model, [0, 0, 0], rank=0).values())


def _largest_difference(model: Any, stages: list[Any]) -> float:
    """Of a logit or a gradient, relative to the largest of its tensor, for three sequences padded on the left."""
    tokens = torch.randint(5, 90, (3, 9), generator=torch.Generator().manual_seed(6))
    mask = (torch.arange(9) >= torch.tensor([[0], [2], [5]])).long()
    results: list[dict[str, Tensor]] = []
    for in_a_row in (False, True):
        model.train().zero_grad()
        torch.manual_seed(7)
        value: Any = tokens
        if in_a_row:
            for stage in stages:
                value = stage.train()(value, attention_mask=mask)
        else:
            value = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        logits = value.float().flatten(0, -2)
        classes = torch.arange(len(logits)) * 5 % logits.shape[-1]
        torch.autograd.backward(torch.nn.functional.cross_entropy(logits, classes))
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        results.append({"": value.detach()} | {k: v.clone() for k, v in gradients.items() if v is not None})
    whole, row = results
    if whole.keys() != row.keys():
        return float("inf")
    largest = max(float(value.abs().max()) for value in whole.values())
    return max(
        float((value - row[name]).abs().max() / max(float(value.abs().max()), 1e-5 * largest))
        for name, value in whole.items()
    )


def main() -> None:
    for head in HEADS:
        answers: Counter[str] = Counter()
        for row in rows(head, sys.argv[1:]):
            answers[row.answer] += 1
            print("| " + " | ".join(row) + " |", flush=True)
        print(f"{head}: " + ", ".join(f"{count} {answer}" for answer, count in sorted(answers.items())), flush=True)


if __name__ == "__main__":
    main()
