"""What ranks run in `test_megatron`: a small GPT of Megatron-core, by its own functions and by ours, on CPUs. The
package is there in an environment of `make stacks` only."""

import gc
import logging
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock
from zlib import crc32

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world

from optpipe.errors import InputError, OptPipeError
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule

MICROBATCHES, LENGTH, WORDS, HIDDEN, SAMPLES = 6, 16, 64, 32, 2
EQUAL, DIFFERENT = [LENGTH] * MICROBATCHES, [9, 16, 4, 12, 7, 15]  # lengths of micro-batches
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "moe_token_dispatcher_type": "allgather",
    "moe_router_dtype": "fp64",
    "add_bias_linear": False,
}
SCALE = 8.0  # of the loss, as in training with fp16


class Division(NamedTuple):
    """By how many ranks tensors, sequences and experts of a stage are divided."""

    tensor: int = 1
    context: int = 1
    expert: int = 1


ONE = Division()


class Outcome(NamedTuple):
    """Two steps on one rank: losses of the second by micro-batch where the last stage is, the sum of both steps'
    gradients by name in the whole model, and peaks of the first."""

    losses: list[float]
    gradients: dict[str, np.ndarray]
    tokens: int | None = None
    peak_bytes: int = 0
    certified_bytes: int = 0
    host_peak_bytes: int = 0


@contextmanager
def on_cpu() -> Iterator[None]:
    """Megatron's GPT asks for a GPU in these places: buffers, the attention's random numbers, and sums of tokens and
    messages of lengths in its schedules."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    tracker, zeros = random.get_cuda_rng_tracker(), torch.zeros
    logging.getLogger(random.__name__).setLevel(logging.ERROR)  # it warns of what is patched here

    def on_this_device(*size: Any, device: Any = None, **how: Any) -> Tensor:
        return zeros(*size, device="cpu" if device == "cuda" else device, **how)

    with (
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        mock.patch.multiple(torch.cuda, current_stream=mock.DEFAULT, stream=mock.DEFAULT, Stream=mock.DEFAULT),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(random, "_get_cuda_rng_state", side_effect=lambda **_: torch.get_rng_state()),
        mock.patch.object(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        mock.patch.dict(tracker.states_, {"model-parallel-rng": torch.Generator().manual_seed(7).get_state()}),
        mock.patch.object(torch, "zeros", on_this_device),
        mock.patch.object(Tensor, "cuda", lambda tensor: tensor),
        mock.patch.object(moe_utils, "te_general_gemm", None, create=True),  # it asks for it where it is not defined
        mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _counts),
        mock.patch.object(torch_norm.WrappedTorchNorm, "__new__", _norm),
    ):
        yield


def _norm(kind: Any, config: Any, hidden_size: int, **_: Any) -> nn.Module:
    """A layer norm that may be sequence parallel, as Megatron's for GPUs: its gradients are summed over the ranks."""
    norm = nn.LayerNorm(hidden_size)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def _attention() -> type[nn.Module]:
    """Megatron's for CPUs, which it does not divide by sequences: this gathers keys and values."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Gathering(DotProductAttention):  # type: ignore[misc]
        def __init__(self, config: Any, *arguments: Any, **named: Any) -> None:
            with mock.patch.object(config, "context_parallel_size", 1):
                super().__init__(config, *arguments, **named)

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any) -> Any:
            group = parallel_state.get_context_parallel_group()
            key, value = (gather_from_sequence_parallel_region(part, True, group) for part in (key, value))
            return super().forward(query, key, value, *others, **named)

    return Gathering


def _counts(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Numbers of tokens, which Megatron copies from a GPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def plain(stages: int, **how: bool) -> Outcome:
    """By Megatron's `forward_backward_no_pipelining`."""
    with _parallel([0] * stages, chunks=1), on_cpu():
        from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

        chunks = _chunks([0] * stages, whole=True)
        return _outcome(forward_backward_no_pipelining, chunks, **how)


def theirs(placement: Sequence[int], division: Division = ONE, options: Mapping[str, Any] = {}, **how: bool) -> Outcome:
    """By the function that Megatron itself takes. `options` are those of the model's config."""
    with _parallel(placement, division), on_cpu():
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        return _outcome(get_forward_backward_func(), _chunks(placement, options=options), **how)


def function(schedule: Schedule) -> Any:
    from optpipe_runtime.megatron import forward_backward_func

    return forward_backward_func(schedule)


@contextmanager
def running(
    schedule: Schedule, division: Division = ONE, options: Mapping[str, Any] = {}
) -> Iterator[tuple[int, Any, dict[int, Any]]]:
    """This rank's number, our function that runs the schedule, and the rank's chunks by stage."""
    placement = [stage.device for stage in schedule.problem.stages]
    with _parallel(placement, division) as rank, on_cpu(), function(schedule) as run:
        yield rank, run, _chunks(placement, options=options)


def ours(
    schedules: Sequence[Schedule], division: Division = ONE, options: Mapping[str, Any] = {}, **how: bool
) -> list[Outcome]:
    """By these schedules. Megatron's GPT needs what `on_cpu` changes, our function none of it."""
    return [_ours(schedule, division, options, how) for schedule in schedules]


def _ours(schedule: Schedule, division: Division, options: Mapping[str, Any], how: dict[str, bool]) -> Outcome:
    with running(schedule, division, options) as (rank, run, chunks):
        reports = []

        def step(**arguments: Any) -> list[Any]:
            found = run(**arguments)
            reports.append(run.report)
            return found

        outcome = _outcome(step, chunks, **how)
        peak, host = reports[0].peak_activation_bytes, reports[0].host_peak_bytes
        certified = schedule.compiled.certificate.device[rank].bytes
        return outcome._replace(peak_bytes=peak, certified_bytes=certified, host_peak_bytes=host)


GETS = "from megatron.core.pipeline_parallel import get_forward_backward_func as get\n"


def in_scripts(schedule: Schedule) -> tuple[list[bool], Outcome]:
    """By the function that scripts get after `use_in_megatron`, and whether each gets ours: one with the name in its
    module before or after, Megatron's training loop where the package has it, and each with all arguments there are."""
    from megatron.core import pipeline_parallel

    from optpipe_runtime.megatron import use_in_megatron

    before, after = ModuleType("before"), ModuleType("after")
    sys.modules |= {"before": before, "after": after}
    exec(GETS, vars(before))
    loop = _training_loop()
    with running(schedule) as (_, run, chunks):
        use_in_megatron(function(schedule))
        use_in_megatron(run)
        exec(GETS, vars(after))
        takers = [before.get, after.get, pipeline_parallel.get_forward_backward_func]
        takers += [pipeline_parallel.schedules.get_forward_backward_func]
        takers += [] if loop is None else [loop.get_forward_backward_func]
        arguments = [{}, {"pp_size": 2, "vp_size": None}, {"schedule_pg_collection": None}]
        found = [take(**named) is run for take in takers for named in arguments] + [takers[0](2, None) is run]
        return found, _outcome(after.get(schedule_pg_collection=None), chunks)


def _training_loop() -> Any:
    """`megatron.training.training`, which the package of 0.16.1 has not."""
    if find_spec("megatron.training") is None:
        return None
    with mock.patch.object(typing, "override", lambda method: method, create=True):  # Python 3.11 has none
        return import_module("megatron.training.training")


def profiled(schedule: Schedule, budget_bytes: int) -> tuple[Problem, list[float]]:
    """The problem of the stages that a schedule places, and the losses of a step after, with the same iterators."""
    with running(schedule) as (_, run, by_stage):
        chunks = list(by_stage.values())
        arguments = _arguments(chunks, step=1)
        found = run.profile(budget_bytes, offload_parts=2, repeats=1, **arguments)
        assert all(p.grad is None for chunk in chunks for p in chunk.parameters())
        return found, [float(loss["lm loss"]) for loss in run(**arguments)]


def profiled_in_ddp(schedule: Schedule) -> list[str]:
    """In Megatron's DistributedDataParallel, between two steps: the parameters that a profile leaves changed, or with
    another gradient or mark, and those without gradients before."""
    with running(schedule) as (_, run, by_stage):
        chunks = list(_in_ddp(by_stage).values())
        parameters = {name: p for chunk in chunks for name, p in chunk.named_parameters()}
        run(**_arguments(chunks))
        for k, parameter in enumerate(parameters.values()):
            parameter.grad_added_to_main_grad = k % 2 == 0
        before = {
            name: (p.main_grad.clone(), p.detach().clone(), p.grad_added_to_main_grad) for name, p in parameters.items()
        }
        run.profile(10**8, repeats=1, **_arguments(chunks, step=1))
        return [
            name
            for name, (main_grad, values, mark) in before.items()
            if not main_grad.any()
            or not torch.equal(main_grad, parameters[name].main_grad)
            or not torch.equal(values, parameters[name])
            or parameters[name].grad is not None
            or parameters[name].grad_added_to_main_grad != mark
        ]


def evaluated(schedule: Schedule) -> tuple[list[float], list[float], list[int]]:
    """By our function, with its forwards only: losses, what else is collected, and how many parameters have a gradient.
    Between them one step."""
    with running(schedule) as (_, run, by_stage):
        chunks, with_gradient, found = list(by_stage.values()), [], []
        for forward_only, collects in ((True, False), (False, False), (True, True)):
            for chunk in chunks:
                chunk.train(not forward_only)
            arguments = _arguments(chunks) | {"forward_only": forward_only, "collect_non_loss_data": collects}
            found.append(run(**arguments))
            with_gradient.append(sum(p.grad is not None for chunk in chunks for p in chunk.parameters()))
        losses = [float(loss["lm loss"]) for loss in found[0]]
        return losses, [float(data) for data in found[2]], with_gradient


def refusals(schedule: Schedule, configs: Sequence[tuple[str, Any]], arguments: Sequence[tuple[str, Any]]) -> list[str]:
    """The sentences for what the function does not take: of the model's config, and of its arguments."""
    found, placement = [], [stage.device for stage in schedule.problem.stages]
    with _parallel(placement), on_cpu():
        chunks = list(_chunks(placement).values())
        for name, value in configs:
            with mock.patch.object(chunks[0].config, name, value):
                found.append(_refused(schedule, _arguments(chunks)))
        return found + [_refused(schedule, _arguments(chunks) | {name: value}) for name, value in arguments]


def _refused(schedule: Schedule, arguments: dict[str, Any]) -> str:
    with pytest.raises(InputError) as refused, function(schedule) as run:
        run(**arguments)
    return str(refused.value)


def refusals_of_one(schedule: Schedule, rank: int) -> list[str]:
    """The sentences where only this rank has what cannot run: a chunk too many, or one for another place."""
    found, placement = [], [stage.device for stage in schedule.problem.stages]
    with _parallel(placement) as own, on_cpu():
        for wrong in ("number", "place"):
            chunks = list(_chunks(placement).values())
            if own == rank and wrong == "number":
                chunks *= 2
            elif own == rank:
                chunks[0].pre_process = not chunks[0].pre_process
            found.append(_refused(schedule, _arguments(chunks)))
    return found


def refused_later(schedule: Schedule, rank: int) -> str:
    """What a rank says in the second step, if this one is given too many iterators for it."""
    placement = [stage.device for stage in schedule.problem.stages]
    with _parallel(placement, rank_ends=True) as own, on_cpu():
        chunks = list(_chunks(placement).values())
        run = function(schedule)
        run(**_arguments(chunks))
        arguments = _arguments(chunks, step=1)
        if own == rank:
            arguments["data_iterator"] = [arguments["data_iterator"]] * 2
        with pytest.raises(OptPipeError) as refused:
            run(**arguments)
        run.close()
        return str(refused.value)


def _each(placement: Sequence[int]) -> int:
    """How many stages a rank has."""
    return placement.count(placement[0])


@contextmanager
def _parallel(
    placement: Sequence[int], division: Division = ONE, chunks: int | None = None, rank_ends: bool = False
) -> Iterator[int]:
    """Megatron's groups for a pipeline whose stages are divided so; this rank's number in it. What ranks there are more
    are replicas. `rank_ends`: groups end with the process, as one has a message that never
    comes."""
    from megatron.core import parallel_state

    gc.collect()  # what refers to groups of before: each has threads
    chunks, before = chunks or _each(placement), set(_world.pg_map)
    parallel_state.initialize_model_parallel(
        division.tensor,
        len(set(placement)),
        chunks if chunks > 1 else None,
        context_parallel_size=division.context,
        expert_model_parallel_size=division.expert,
        expert_tensor_parallel_size=None if division.expert == 1 else 1,
        create_gloo_process_groups=False,
    )
    try:
        yield parallel_state.get_pipeline_model_parallel_rank()
    finally:
        parallel_state.destroy_model_parallel()  # which leaves all groups, each with threads of its own
    if not rank_ends:
        dist.barrier()  # others may still use them
        for group in set(_world.pg_map) - before:
            dist.destroy_process_group(group)


def groups_left(schedule: Schedule) -> int:
    """How many more process groups there are after steps by both functions than before."""
    before = len(_world.pg_map)
    theirs([stage.device for stage in schedule.problem.stages])
    ours([schedule])
    return len(_world.pg_map) - before


def _chunks(placement: Sequence[int], whole: bool = False, options: Mapping[str, Any] = {}) -> dict[int, Any]:
    """This rank's chunks by stage, of two layers each; `whole` for one with all layers. A layer has the same weights
    wherever it is."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    stages = 1 if whole else len(placement)
    config = TransformerConfig(
        num_layers=2 * len(placement),
        hidden_size=HIDDEN,
        num_attention_heads=4,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        pipeline_model_parallel_size=1 if whole else len(set(placement)),
        virtual_pipeline_model_parallel_size=None if whole or _each(placement) == 1 else _each(placement),
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        attention_softmax_in_fp32=False,
        batch_p2p_comm=False,  # which waits for a GPU
        overlap_p2p_comm=not whole and _each(placement) > 1,  # else two ranks exchange messages of both directions
        **({"hidden_dropout": 0.0, "attention_dropout": 0.0} | dict(options)),
    )
    layer = get_gpt_layer_local_spec(num_experts=options.get("num_moe_experts"))
    layer.submodules.self_attention.submodules.core_attention = _attention()
    rank = parallel_state.get_pipeline_model_parallel_rank()
    own = [s for s in range(stages) if whole or placement[s] == rank]
    chunks = {}
    for k, s in enumerate(own):
        chunks[s] = GPTModel(
            config,
            layer,
            vocab_size=WORDS,
            max_sequence_length=LENGTH,
            pre_process=s == 0,
            post_process=s == stages - 1,
            share_embeddings_and_output_weights=False,
            vp_stage=None if len(own) == 1 else k,
            mtp_block_spec=get_gpt_mtp_block_spec(config, layer, False)
            if config.mtp_num_layers and s == stages - 1
            else None,
        ).double()
        with torch.no_grad():
            for name, parameter in chunks[s].named_parameters():
                part = parallel_state.get_expert_model_parallel_rank() if ".experts." in name else 0
                generator = torch.Generator().manual_seed(crc32(_in_whole(name, s).encode()) + part)
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) / 8)
    return chunks


def _in_whole(name: str, stage: int) -> str:
    """A parameter's name in the whole model."""
    parts = name.removeprefix("module.").split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + 2 * stage)
    return ".".join(parts)


def _batches(step: int, lengths: Sequence[int]) -> Iterator[tuple[Tensor, ...]]:
    """New micro-batches, as a data loader has them: others in each replica of a pipeline."""
    from megatron.core import parallel_state

    alone = parallel_state.get_pipeline_model_parallel_world_size() == 1
    replica = 0 if alone else parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(step + 10 * replica)
    for length in [*lengths[replica:], *lengths[:replica]]:
        tokens = torch.randint(WORDS, (SAMPLES, length + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def forward_step(iterator: Iterator[tuple[Tensor, ...]], model: Any) -> tuple[Tensor, Callable[..., Any]]:
    from megatron.core import parallel_state

    tokens, labels = next(iterator)
    length = tokens.shape[1]
    own = torch.arange(length).chunk(parallel_state.get_context_parallel_world_size())
    part = own[parallel_state.get_context_parallel_rank()]
    tokens, labels, places = tokens[:, part], labels[:, part], part.expand(SAMPLES, -1)
    above = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)[:, :, part]
    output = model(tokens, places, above, labels=labels)

    def loss(output: Tensor, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return output.mean()
        real = labels % 3 > 0  # the others are padding: micro-batches have different numbers of tokens
        total, tokens = (output * real).sum(), real.sum().to(torch.int)
        if model.config.calculate_per_token_loss:
            return total, tokens, {"lm loss": total.detach().clone()}
        return total / tokens, {"lm loss": (total / tokens).detach().clone()}

    return output, loss


def _arguments(chunks: Sequence[Any], step: int = 0, lengths: Sequence[int] = EQUAL) -> dict[str, Any]:
    iterators: list[Iterator[Any]] = [_batches(step, lengths) for _ in chunks]
    several = len(chunks) > 1
    return {
        "forward_step_func": forward_step,
        "data_iterator": iterators if several else iterators[0],
        "model": list(chunks) if several else chunks[0],
        "num_microbatches": MICROBATCHES,
        "seq_length": LENGTH,
        "micro_batch_size": SAMPLES,
    }


def _in_ddp(chunks: dict[int, Any], sum_in_float32: bool = False, sharded: bool = False) -> dict[int, Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    options = DistributedDataParallelConfig(grad_reduce_in_fp32=sum_in_float32, use_distributed_optimizer=sharded)
    return {s: DistributedDataParallel(chunk.config, options, chunk) for s, chunk in chunks.items()}


def _outcome(
    run: Callable[..., list[Any]],
    chunks: dict[int, Any],
    in_ddp: bool = False,
    per_token: bool = False,
    in_bfloat16: bool = False,
    different: bool = False,
    sharded: bool = False,
) -> Outcome:
    """`in_ddp`: with the chunks in Megatron's own DistributedDataParallel, which has buffers for gradients. `sharded`:
    of each buffer a replica has the sum of its part only, as the distributed optimizer needs it.
    `per_token`: with the losses of all tokens summed, and gradients divided by their number. `in_bfloat16`: parameters
    are, and buffers in float32. `different`: micro-batches have different lengths, others in each step."""
    from megatron.core.distributed import finalize_model_grads

    tokens: list[int | None] = []

    def finalize(model: list[Any], num_tokens: Tensor | None, **groups: Any) -> None:
        tokens.append(None if num_tokens is None else int(num_tokens))
        if in_ddp:
            finalize_model_grads(model, num_tokens, **groups)

    torch.manual_seed(0)
    config = next(iter(chunks.values())).config
    config.grad_scale_func = lambda loss: loss * SCALE
    config.finalize_model_grads_func = finalize
    config.calculate_per_token_loss = per_token
    config.variable_seq_lengths = different
    if in_bfloat16:
        config.params_dtype = config.pipeline_dtype = torch.bfloat16
        chunks = {s: chunk.bfloat16() for s, chunk in chunks.items()}
    if in_ddp:
        chunks = _in_ddp(chunks, in_bfloat16, sharded)
        config.no_sync_func = [chunk.no_sync for chunk in chunks.values()]
        if len(chunks) == 1:
            (config.no_sync_func,) = config.no_sync_func
    for step in range(2):
        lengths = [*DIFFERENT[step:], *DIFFERENT[:step]] if different else EQUAL
        found = run(**_arguments(list(chunks.values()), step, lengths))
    gradients = {
        _in_whole(name, s): (p.main_grad if in_ddp else p.grad).numpy().copy()
        for s, chunk in chunks.items()
        for name, p in chunk.named_parameters()
    }
    gradients |= {
        _in_whole(name, s): bias.numpy().copy()  # Megatron's update of it after a step is by the counts of all tokens
        for s, chunk in chunks.items()
        for name, bias in chunk.named_buffers()
        if name.endswith("expert_bias")
    }
    return Outcome([float(loss["lm loss"]) for loss in found], gradients, tokens[-1])
