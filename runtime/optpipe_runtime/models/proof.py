"""Whether a row of stages is the model that it was cut from.

A model's own forward decides what happens around its layers, and a stage runs it over some layers only. Nothing in the
model says whether that is the same, so both are run: a small copy of the model and the row of its stages, with the same
inputs and random numbers, in both modes, with and without a mask. Outputs and the gradients of all parameters must be
equal. Each stage is a copy, as on a rank of its own: nothing passes between two stages beside what they return.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from optpipe.errors import InputError
from optpipe_runtime.models.part import Part
from optpipe_runtime.models.small import small_copy

SEQUENCES, LENGTH = 2, 12
OUTPUT_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-3  # relative to the largest number; both runs do the same operations
Cut = Callable[[Any], list[Part]]


class Side(NamedTuple):
    """The model, or the row of its stages. A parameter of several stages has several copies."""

    forward: Callable[..., Tensor]
    modules: list[nn.Module]
    parameters: dict[str, list[nn.Parameter]]


class Case(NamedTuple):
    """What a run is given, and in which mode."""

    training: bool
    inputs: dict[str, Tensor]


class RunResult(NamedTuple):
    """What came out of one forward and backward."""

    output: Tensor
    gradients: dict[str, Tensor]


def require_equal(model: Any, cut: Cut) -> None:
    """Compares a model with the row of its stages.

    Parameters
    ----------
    model
        Of transformers, or built alike. It is not run: a small copy of it is (`small_copy`).
    cut
        Gives the stages of such a copy.

    Raises
    ------
    InputError
        If they differ, or if no small copy can be run.
    """
    kind = type(model).__name__
    with torch.device("cpu"), torch.inference_mode(False), _nothing_compiled():
        try:
            small = small_copy(model)
            row, whole = _row(small, cut(small)), _whole(small)
            for case in _cases(small.base_model.embed_tokens, getattr(small, "config", None)):
                run = _run_of_the_whole(whole, case)
                difference = _difference(run, row, case) if run else None
                if difference:
                    break
        except Exception as error:
            reason = (
                _reason(error) if isinstance(error, InputError) else f"a small run of it fails with {_reason(error)}"
            )
            raise InputError(f"model is a {kind}: it cannot be compared with a row of its stages: {reason}") from None
    if difference:
        raise InputError(f"model is a {kind}: {difference}; give a list of its layers, or cut it by torch's SplitPoint")


def _nothing_compiled() -> AbstractContextManager[Any]:
    """What was compiled runs as it was written. The compiler is not loaded for this."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _whole(small: Any) -> Side:
    def forward(**inputs: Tensor) -> Tensor:
        output: Any = small(use_cache=False, **inputs)
        if not isinstance(getattr(output, "logits", None), Tensor):
            raise InputError("what it returns has no logits")
        logits: Tensor = output.logits
        return logits

    parameters = {name: [parameter] for name, parameter in _trained(small)}
    return Side(forward, [small], parameters)


def _row(small: Any, stages: Sequence[Part]) -> Side:
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
