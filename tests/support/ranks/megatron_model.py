"""A small GPT of Megatron-core on CPUs: its groups, chunks, data and what it is called with. The package is there in an
environment of `make stacks` only."""

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world

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
A2A = EXPERTS | {"moe_token_dispatcher_type": "alltoall"}
BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
SCALE = 8.0  # of the loss, as in training with fp16


class Division(NamedTuple):
    """By how many ranks tensors, sequences and experts of a stage are divided."""

    tensor: int = 1
    context: int = 1
    expert: int = 1


ONE = Division()


@contextmanager
def on_cpu() -> Iterator[None]:
    """Megatron asks for a GPU in these places: buffers, the attention's random numbers, sums of tokens and messages of
    lengths in its schedules, numbers and names of types in its optimizer."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    tracker, type_of = random.get_cuda_rng_tracker(), Tensor.type
    logging.getLogger(random.__name__).setLevel(logging.ERROR)  # it warns of what is patched here

    def on_this_device(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *values, device=None, **how: make(*values, device="cpu" if device == "cuda" else device, **how)

    def named_for_cuda(tensor: Tensor, *to: Any, **how: Any) -> Any:
        return type_of(tensor, *to, **how) if to else type_of(tensor).replace("torch.", "torch.cuda.")

    with (
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        mock.patch.multiple(torch.cuda, current_stream=mock.DEFAULT, stream=mock.DEFAULT, Stream=mock.DEFAULT),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(random, "_get_cuda_rng_state", side_effect=lambda **_: torch.get_rng_state()),
        mock.patch.object(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        mock.patch.dict(tracker.states_, {"model-parallel-rng": torch.Generator().manual_seed(7).get_state()}),
        mock.patch.object(torch, "zeros", on_this_device(torch.zeros)),
        mock.patch.object(torch, "tensor", on_this_device(torch.tensor)),
        mock.patch.object(Tensor, "type", named_for_cuda),
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


def _each(placement: Sequence[int]) -> int:
    """How many stages a rank has."""
    return placement.count(placement[0])


@contextmanager
def parallel(
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


def make_chunks(placement: Sequence[int], whole: bool = False, options: Mapping[str, Any] = {}) -> dict[int, Any]:
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
                generator = torch.Generator().manual_seed(crc32(in_whole(name, s).encode()) + part)
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) / 8)
    return chunks


def in_whole(name: str, stage: int) -> str:
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


def forward_step(
    iterator: Iterator[tuple[Tensor, ...]], model: Any, run: Callable[..., Any] | None = None
) -> tuple[Any, Callable[..., Any]]:
    """What `run` returns, by default the model itself, and the loss function."""
    from megatron.core import parallel_state

    tokens, labels = next(iterator)
    length = tokens.shape[1]
    own = torch.arange(length).chunk(parallel_state.get_context_parallel_world_size())
    part = own[parallel_state.get_context_parallel_rank()]
    tokens, labels, places = tokens[:, part], labels[:, part], part.expand(SAMPLES, -1)
    above = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)[:, :, part]
    output = (run or model)(tokens, places, above, labels=labels)

    def loss(output: Tensor, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return output.mean()
        real = labels % 3 > 0  # the others are padding: micro-batches have different numbers of tokens
        total, tokens = (output * real).sum(), real.sum().to(torch.int)
        if model.config.calculate_per_token_loss:
            return total, tokens, {"lm loss": total.detach().clone()}
        return total / tokens, {"lm loss": (total / tokens).detach().clone()}

    return output, loss


def arguments_of(chunks: Sequence[Any], step: int = 0, lengths: Sequence[int] = EQUAL) -> dict[str, Any]:
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


def wrap_in_ddp(chunks: dict[int, Any], sum_in_float32: bool = False, sharded: bool = False) -> dict[int, Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    options = DistributedDataParallelConfig(grad_reduce_in_fp32=sum_in_float32, use_distributed_optimizer=sharded)
    return {s: DistributedDataParallel(chunk.config, options, chunk) for s, chunk in chunks.items()}


def forget_graphs(chunk: nn.Module) -> None:
    """Takes from Megatron's dispatchers of experts the probabilities of their last forward. Their graph refers to the
    whole model by hooks of Megatron's DistributedDataParallel, and no garbage collection sees that cycle: model, groups
    and their threads would stay."""
    dispatchers = [part.token_dispatcher for part in chunk.modules() if hasattr(part, "token_dispatcher")]
    for dispatcher in dispatchers:
        for name, value in vars(dispatcher).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                setattr(dispatcher, name, None)
