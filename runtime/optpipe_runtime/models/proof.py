"""Whether a row of stages is the model that it was cut from.

A model's own forward decides what happens around its layers, and a stage runs it over some layers only. Nothing in the
model says whether that is the same, so both are run: a small copy of the model and the row of its stages, with the same
inputs and random numbers, in both modes, with and without a mask. Outputs and the gradients of all parameters must be
equal. Each stage is a copy, as on a rank of its own: nothing passes between two stages beside what they return.

A model of few parameters is copied as it is, with whatever its user has changed in it. A larger one of transformers is
made anew from its config, with all of its layers, but narrow. That needs no memory of the model's size, and works for a
model on the `meta` device.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from optpipe.errors import InputError
from optpipe_runtime.torch_private.tensors import is_wrapped

SEQUENCES, LENGTH = 2, 12
OUTPUT_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-3  # relative to the largest number; both runs do the same operations
Cut = Callable[[Any], Sequence[nn.Module]]


class Side(NamedTuple):
    """The model, or the row of its stages. A parameter of several stages has several copies."""

    forward: Callable[..., Tensor]
    modules: list[nn.Module]
    parameters: dict[str, list[nn.Parameter]]


class Case(NamedTuple):
    training: bool
    inputs: dict[str, Tensor]


class RunResult(NamedTuple):
    output: Tensor
    gradients: dict[str, Tensor]


def require_equal(model: Any, cut: Cut) -> None:
    """Compares a model of transformers, or built alike, with the row of its stages. It is not run: a small copy of it
    is (`small_copy`), of which `cut` gives the stages. Raises `InputError` if they differ, or if no copy can be run."""
    kind = type(model).__name__
    # What was compiled runs as it was written. The compiler is not loaded for this.
    as_written = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with torch.device("cpu"), torch.inference_mode(False), as_written:
        try:
            small = small_copy(model)
            row, whole = _row(small, cut(small)), _whole(small)
            for case in _cases(small.base_model.embed_tokens, getattr(small, "config", None)):
                run = _run_of_the_whole(whole, case)
                difference = _difference(run, row, case) if run else None
                if difference:
                    break
        except Exception as error:
            fails = "" if isinstance(error, InputError) else "a small run of it fails with "
            reason = fails + _reason(error)
            raise InputError(f"model is a {kind}: it cannot be compared with a row of its stages: {reason}") from None
    if difference:
        raise InputError(f"model is a {kind}: {difference}; give a list of its layers, or cut it by torch's SplitPoint")


def _whole(small: Any) -> Side:
    def forward(**inputs: Tensor) -> Tensor:
        output: Any = small(use_cache=False, **inputs)
        if not isinstance(getattr(output, "logits", None), Tensor):
            raise InputError("what it returns has no logits")
        logits: Tensor = output.logits
        return logits

    parameters = {name: [parameter] for name, parameter in _trained(small)}
    return Side(forward, [small], parameters)


def _row(small: Any, stages: Sequence[nn.Module]) -> Side:
    """Copies of the stages."""
    parameters: dict[nn.Parameter, list[nn.Parameter]] = {parameter: [] for _, parameter in _trained(small)}
    copies = [copy.deepcopy(stage) for stage in stages]
    for stage, copied in zip(stages, copies, strict=True):
        for parameter, twin in zip(stage.parameters(), copied.parameters(), strict=True):
            if parameter in parameters:
                parameters[parameter].append(twin)

    def forward(input_ids: Tensor, **named: Tensor) -> Tensor:
        value = input_ids
        for stage in copies:
            value = stage(value, **named)
        return value

    return Side(forward, [*copies], {name: parameters[parameter] for name, parameter in _trained(small)})


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def _run_of_the_whole(whole: Side, case: Case) -> RunResult | None:
    """None if the model does not take what the case gives it beside the tokens."""
    try:
        return _run(whole, case)
    except TypeError as error:
        if len(case.inputs) == 1 or "unexpected keyword argument" not in str(error):
            raise
        return None


def _cases(embedding: Any, config: Any) -> Iterator[Case]:
    """Sequences padded at the end and at the beginning, with and without a mask and positions."""
    words = next(embedding.parameters()).shape[0]
    tokens = torch.randint(words, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, LENGTH - 4 :] = 0
    mask[1, :3] = 0
    padding = getattr(config, "pad_token_id", None)
    if isinstance(padding, int) and 0 <= padding < words:
        tokens[mask == 0] = padding
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    yield Case(False, {"input_ids": tokens})
    yield Case(True, {"input_ids": tokens, "attention_mask": mask})
    yield Case(True, {"input_ids": tokens, "attention_mask": mask, "position_ids": positions})


def _run(side: Side, case: Case) -> RunResult:
    """A forward, and a backward from random weights on what comes out."""
    for module in side.modules:
        module.train(case.training)
    copies = [twin for twins in side.parameters.values() for twin in twins]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(2)
        output = side.forward(**{name: value.clone() for name, value in case.inputs.items()})
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
        loss = (output.float() * weights).sum()
        by_copy = dict(zip(copies, torch.autograd.grad(loss, copies, allow_unused=True), strict=True))
    gradients = {}
    for name, twins in side.parameters.items():
        there = [gradient for twin in twins if (gradient := by_copy[twin]) is not None]
        gradients[name] = torch.stack(there).sum(0) if there else torch.zeros(())
    if not all(tensor.isfinite().all() for tensor in (output, *gradients.values())):
        raise InputError("with random weights not all numbers of a small run are finite")
    return RunResult(output.detach(), gradients)


def _difference(whole: RunResult, row: Side, case: Case) -> str | None:
    """What a run of its stages does otherwise than one of the model."""
    try:
        run = _run(row, case)
    except Exception as error:
        return f"as a row of stages it fails with {_reason(error)}"
    if whole.output.shape != run.output.shape or not _equal(whole.output, run.output, OUTPUT_TOLERANCE):
        return "as a row of stages it has other logits, so its forward does more than pass hidden states on"
    largest = max(float(gradient.abs().max()) for gradient in whole.gradients.values())
    for name, gradient in whole.gradients.items():
        if not _equal(gradient, run.gradients[name], GRADIENT_TOLERANCE, 1e-6 * largest):
            return f"as a row of stages it has another gradient of {name}"
    return None


def _equal(one: Tensor, other: Tensor, relative: float, absolute: float = 0.0) -> bool:
    difference, largest = (one - other).abs().nan_to_num(), one.abs().nan_to_num(posinf=0.0)
    return bool(difference.max() <= relative * largest.max() + absolute) if one.numel() else True


def _reason(error: Exception) -> str:
    if isinstance(error, InputError):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# A small copy

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
    """The modules outside of layers and the layers, and whether something was put around the forward of one."""
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
    """Noise on all parameters, frozen ones, too: one that is zero, such as a gate, hides what it multiplies."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.grad = None
                parameter.requires_grad_()
                size = min(0.1, 0.8 * parameter.shape[-1] ** -0.5) if parameter.ndim > 1 else 0.1
                parameter += size * torch.randn(parameter.shape, generator=generator)
    return model


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
