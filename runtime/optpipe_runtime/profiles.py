"""What is measured beside the stages of a training: a model layer by layer (`profile_layers`), so that a search can cut
it and place its stages, and what `optpipe profile` is given: a function that returns a `Setup`, or a config of
transformers.

problem = profile_layers(model, loss_fn, microbatches, inputs, targets, activation_budget_bytes=2 * 10**9)
schedule = on_all_ranks(optpipe.solve(problem, placements="all").schedule if dist.get_rank() == 0 else None)
stages = stages_of(model, schedule)  # as they were found
placement = [stage.device for stage in schedule.problem.stages]
with Pipeline(stages, placement, loss_fn, microbatches) as pipe:
    pipe.load(schedule)

# model.py, for `optpipe profile --model model:factory --ranks 2 --microbatches 8`
def factory(rank: int, ranks: int) -> Setup:
    placement = list(range(ranks))
    return Setup({rank: make_stage(rank)}, placement, F.cross_entropy, *first_batch(), {"full_duplex": True})
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optpipe.errors import InputError, did_you_mean
from optpipe.files import parse_json, read_text
from optpipe.model.placement import rechunk
from optpipe.model.problem import Problem
from optpipe_runtime.models.model import evenly
from optpipe_runtime.models.stages import model_of, stages_of
from optpipe_runtime.pipeline import Pipeline
from optpipe_runtime.stage.io import LossFn
from optpipe_runtime.torch_private.tensors import buffers_of, parameters_of

T = TypeVar("T")

REQUIRED = ("stages", "placement", "loss_fn", "microbatches")  # arguments of `Pipeline` that are no options


def profile_layers(
    model: Any,
    loss_fn: LossFn,
    microbatches: int,
    inputs: Any = None,
    targets: Any = None,
    activation_budget_bytes: int | None = None,
    offload_parts: int = 1,
    repeats: int = 7,
    kwargs: Mapping[Any, Any] | None = None,
    **options: Any,
) -> Problem:
    """Measures each layer of a model as a stage of its own. Collective.

    Returns a problem with `layers`, and one stage on each rank, as even as the layers allow; the same on every rank.

    Parameters
    ----------
    model
        A list of layers, an nn.Sequential, or a causal language model of transformers, as for `stages_of`.
    loss_fn, microbatches, options
        As for `Pipeline`.
    inputs, targets, activation_budget_bytes, offload_parts, repeats, kwargs
        As for `Pipeline.profile`. Every rank has some layers, so inputs are needed on the first rank, targets on the
        last one, and named arguments on all.
    """
    ranks, count = dist.get_world_size(options.get("group")), model_of(model).layers
    placement = [rank for rank, share in enumerate(evenly(count, ranks)) for _ in range(share)]
    stages = stages_of(model, placement, [1] * count, rank=dist.get_rank(options.get("group")))
    with Pipeline(stages, placement, loss_fn, microbatches, **options) as pipe:
        measured = pipe.profile(inputs, targets, activation_budget_bytes, offload_parts, repeats, kwargs)
    layers = [stage.model_dump(exclude={"device"}, exclude_none=True) for stage in measured.stages]
    return rechunk(measured.replace(layers=layers), 1)


def on_all_ranks(value: T | None, group: dist.ProcessGroup | None = None) -> T:
    """What rank 0 of the group gives, such as the schedule that it has found, on every rank. Collective. Raises
    `InputError` on all ranks if it is None."""
    box: list[Any] = [value]
    dist.broadcast_object_list(box, group=group, group_src=0)
    value = box[0]
    if value is None:
        raise InputError(
            "on_all_ranks was given None on rank 0; if a search found no schedule, its result has the reason"
        )
    return value


@dataclass(frozen=True)
class Setup:
    """What `optpipe profile` measures on one rank. Modules and tensors must be on the rank's device: `cuda:0` for the
    first rank of a node, and so on, by LOCAL_RANK.

    Attributes
    ----------
    stages, placement, loss_fn
        Arguments of `Pipeline`.
    inputs, targets
        A whole batch, as for `Pipeline.step`.
    options
        Further arguments of `Pipeline`, by name.
    kwargs
        Named arguments of the stages, as for `Pipeline.step`.
    name
        The name of the problem.
    """

    stages: Mapping[int, nn.Module]
    placement: Sequence[int]
    loss_fn: LossFn
    inputs: Any
    targets: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    kwargs: Mapping[Any, Any] = field(default_factory=dict)
    name: str = ""

    def pipeline(self, microbatches: int) -> Pipeline:
        """Makes the pipeline. Collective. Raises `InputError` for an unknown option."""
        names = [name for name in inspect.signature(Pipeline).parameters if name not in REQUIRED]
        for name in self.options:
            if name not in names:
                raise InputError(f"options has {name!r}: must be one of {', '.join(names)}")
        return Pipeline(self.stages, self.placement, self.loss_fn, microbatches, **self.options)


Factory = Callable[[int, int], Setup]  # of a rank and the number of ranks


class BatchSizes(NamedTuple):
    """What a batch of a language model is made of: micro-batches, sequences of a micro-batch, and tokens of a sequence.
    None: one sequence; as long as the model's config has it."""

    microbatches: int
    microbatch_size: int | None = None
    sequence: int | None = None


def find_factory(model: str, sizes: BatchSizes) -> Factory:
    """What makes the stages and the batch of a rank: `module:function`, a user's function, which is called with rank
    and ranks and makes a batch of its own; its module may be in the current folder or beside the script. Or the path of
    a `config.json`: a causal language model of transformers, with a batch of these sizes. Raises `InputError` if there
    is no such model, its package is not installed, or it cannot be measured."""
    if model.endswith(".json"):
        return _of_config(model, sizes)
    for name in ("microbatch_size", "sequence"):
        if getattr(sizes, name) is not None:
            raise InputError(f"{name} = {getattr(sizes, name)}: model = {model!r} makes its own batch, so leave it out")
    module_name, colon, function_name = model.partition(":")
    if not (module_name and colon and function_name.isidentifier()):
        raise InputError(
            f"model = {model!r}: must be MODULE:FUNCTION such as train.model:factory, or a config.json of transformers"
        )
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise InputError(f"model = {model!r}: {module_name} cannot be imported: {error}") from None
    make = getattr(module, function_name, None)
    if not callable(make):
        there = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise InputError(
            f"model = {model!r}: {module_name} has no function {function_name}; it has {', '.join(there) or 'none'}"
        )
    try:
        inspect.signature(make).bind(0, 1)
    except TypeError as error:
        raise InputError(f"model = {model!r}: it is called with rank and ranks: {error}") from None

    def factory(rank: int, ranks: int) -> Setup:
        setup = make(rank, ranks)
        if not isinstance(setup, Setup):
            raise InputError(
                f"model = {model!r}: it returned a {type(setup).__name__}, optpipe_runtime.Setup was expected"
            )
        return setup

    return factory


def _of_config(path: str, sizes: BatchSizes) -> Factory:
    """A causal language model by its config: cut evenly, one stage a rank, with random weights. It is made without
    memory, on the `meta` device; a rank then gets its own stage only. Nothing is downloaded."""
    try:
        import transformers
    except ImportError:
        raise InputError(f"{path}: transformers is not installed: pip install transformers") from None
    config = _config(path)
    each, sequence = sizes.microbatch_size or 1, sizes.sequence or getattr(config, "max_position_embeddings", None)
    if not sequence:
        raise InputError(f"sequence is missing: {path} has no max_position_embeddings")

    def factory(rank: int, ranks: int) -> Setup:
        with torch.device("meta"):
            model = _made(path, lambda: transformers.AutoModelForCausalLM.from_config(config))
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        stage: Any = stages_of(model, range(ranks), rank=rank)[rank]
        _place(stage, device)
        stage.model.initialize_weights()
        vocabulary = model.config.vocab_size

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            value: Tensor = model.loss_function(logits, labels, vocabulary)
            return value

        shape = sizes.microbatches * each, sequence
        tokens = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(device)
        name = f"{type(model).__name__}, {each} x {sequence} tokens a micro-batch"
        return Setup({rank: stage.train()}, range(ranks), loss, tokens, tokens, name=name[:200])

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


def _made(path: str, make: Callable[[], Any]) -> Any:
    """What transformers makes of the config. What it raises about one becomes a sentence."""
    try:
        return make()
    except Exception as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: transformers does not make a model of it: {reason[:300]}") from None


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
