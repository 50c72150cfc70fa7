"""A small copy of a model on CPU, with random weights: what a proof runs (`proof`).

A model of few parameters is copied as it is, with whatever its user has changed in it. A larger one of transformers is
made anew from its config, with all of its layers, but narrow. That needs no memory of the model's size, and works for a
model on the `meta` device.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from optpipe.errors import InputError
from optpipe_runtime.torch_private.modules import is_wrapped

MOST_PARAMETERS = 2**24  # of a copy: 64 MB, and three times as much while gradients are computed
WORDS = 96  # in the vocabulary of a narrow model
EXPERTS = 16

Narrowing = Callable[[int], int]


def small_copy(model: Any) -> Any:
    """Raises `InputError` if there is none."""
    count = sum(parameter.numel() for parameter in model.parameters())
    if count <= MOST_PARAMETERS:
        return _randomized(_as_is(model))
    small = _of_config(model, narrow_config(model.config)) if _has_config(model) else None
    if small is None:
        raise InputError(f"it has {count / 1e6:.0f} million parameters, and its config makes no small model like it")
    return _randomized(small)


def _has_config(model: Any) -> bool:
    return hasattr(getattr(model, "config", None), "to_dict")


def _as_is(model: Any) -> Any:
    """A copy. What is on the `meta` device has no values; those of buffers only its class knows."""
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return _runnable(copy.deepcopy(model).to("cpu"))
    if (anew := _of_config(model, model.config) if _has_config(model) else None) is not None:
        return anew
    empty = copy.deepcopy(model).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*empty.parameters(), *empty.buffers()):
            tensor.zero_()
    return _runnable(empty)


def _of_config(model: Any, config: Any) -> Any | None:
    """A new model of this class and config, if it is small and built as `model` is."""
    with torch.device("meta"):
        outline = type(model)(copy.deepcopy(config))
    few = sum(parameter.numel() for parameter in outline.parameters()) <= MOST_PARAMETERS
    if not few or _structure(outline) != _structure(model):
        return None
    return _runnable(type(model)(copy.deepcopy(config)))


def _structure(model: nn.Module) -> list[tuple[str, type, bool]]:
    """The modules outside of layers and the layers, and whether something was put around the forward of one. What is
    in a layer does not matter: its class says what it takes and returns."""
    modules = (item for item in model.named_modules(remove_duplicate=False) if not re.search(r"layers\.\d+\.", item[0]))
    return [(name, type(module), is_wrapped(module)) for name, module in modules]


def _runnable(model: Any) -> Any:
    """In 32 bits at least. Kernels of attention that are for GPUs only give way to torch's own."""
    if not any(parameter.dtype == torch.float64 for parameter in model.parameters()):
        model.float()
    if _has_config(model) and model.config._attn_implementation not in ("eager", "sdpa"):
        model.config._attn_implementation = "eager"
    return model


def _randomized(model: Any) -> Any:
    """Noise on all parameters, also those that are frozen: one that is zero, such as a gate, would hide what it
    multiplies."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.grad = None
                parameter.requires_grad_()
                size = min(0.1, 0.8 * parameter.shape[-1] ** -0.5) if parameter.ndim > 1 else 0.1
                parameter += size * torch.randn(parameter.shape, generator=generator)
    return model


# From here on: a narrow config


def _divide(value: int) -> int:
    """A number of heads. Where one kind of heads is a multiple of another, it stays one."""
    return next(value // divisor for divisor in (8, 4, 2, 1) if value % divisor == 0)


# What a field's name ends in or has in it, and what becomes of its value. The first that fits counts; others stay.
FIELDS: tuple[tuple[str, Narrowing], ...] = (
    (r"vocab_size", lambda value: min(value, WORDS)),
    (r"token_id$", lambda value: value if value < WORDS else value % 7 + 3),
    (r"(num|n)_.*heads|swa_num.*heads|^n_heads", _divide),
    (r"head_dim|d_head|kv_channels|rotary_dim|mrope_section", lambda value: max(1, value // 8)),
    (r"intermediate_size|ffn|feed_forward|dense_size|router_hidden", lambda value: min(value, 32)),
    (r"_rank$|hidden_size_per_layer|embed_dim", lambda value: min(value, 16)),
    (r"(num|n)_(\w*_)?experts$|expert_num$", lambda value: min(value, EXPERTS)),
    (r"per_tok|top_?k$|moe_k$", lambda value: min(value, 4)),
    (r"sliding_window$|window_size$", lambda value: min(value, 4)),
    (r"d_state|chunk_size$", lambda value: min(value, 8)),
)


def narrow_config(config: Any) -> Any:
    """The config with all of its layers, and heads and experts of a few numbers each. Ratios that models rely on stay:
    of heads to heads of keys, of the width to heads, of parts of a head to the head."""
    narrow = copy.deepcopy(config)
    _narrow(vars(narrow))
    return narrow


def _narrow(fields: dict[str, Any]) -> None:
    width, heads, each = (fields.get(name) for name in ("hidden_size", "num_attention_heads", "head_dim"))
    for name, value in fields.items():
        if isinstance(value, dict):
            _narrow(value)
        elif hasattr(value, "to_dict"):
            _narrow(vars(value))
        elif isinstance(name, str):
            fields[name] = _narrowed(name, value)
    if isinstance(width, int) and isinstance(heads, int):
        aligned = 4 * max(1, width // heads // 32)  # rows of a multiple of 16 bytes, which some kernels want
        of_a_head = fields["head_dim"] if isinstance(each, int) and width == heads * each else aligned
        fields["hidden_size"] = fields["num_attention_heads"] * of_a_head


def _narrowed(name: str, value: Any) -> Any:
    change = next((change for pattern, change in FIELDS if re.search(pattern, name)), None)
    if name in ("short_factor", "long_factor") and isinstance(value, list):  # one for each two numbers of a head
        return value[: max(1, len(value) // 8)]
    if change is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return change(value)
    if isinstance(value, list) and value and all(isinstance(one, int) and not isinstance(one, bool) for one in value):
        return [change(one) for one in value]
    return value
