"""What a schedule here cannot run with: options of Megatron's, and chunks that are not those of the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from optpipe.errors import InputError
from optpipe.model.problem import Problem
from optpipe_runtime.megatron.chunk import Chunk

# What a config must not ask for, and why.
REFUSED = {
    "cpu_offloading": "the schedule says what is offloaded",
    "fine_grained_activation_offloading": "the schedule says what is offloaded",
    "num_microbatches_with_partial_activation_checkpoints": "the schedule says what is recomputed",
    "overlap_moe_expert_parallel_comm": "its order of ops is Megatron's own",
    "hybrid_context_parallel": "its order of ops is Megatron's own",
    "defer_embedding_wgrad_compute": "weight gradients come with the schedule's W",
    "enable_autocast": "linear layers compute in the type of their parameters",
}


def as_stages(chunks: Sequence[nn.Module], config: Any, groups: Any, problem: Problem) -> list[Chunk]:
    """These chunks as stages. Raises `InputError` if schedules of the problem cannot run on them."""
    _require_supported(config, chunks)
    rank = groups.pp.rank()
    numbers = problem.stages_on(rank) if rank < len(problem.devices) else []
    if len(problem.devices) != groups.pp.size() or len(numbers) != len(chunks):
        raise InputError(
            f"model has {len(chunks)} chunks on rank {rank} of {groups.pp.size()}: the schedule places "
            f"{len(numbers)} there, on {len(problem.devices)} ranks"
        )
    ends, last = len(problem.stages) - 1, groups.pp.size() - 1
    if (problem.stages[0].device, problem.stages[-1].device) != (0, last) and any(map(_ties, chunks)):
        raise InputError(
            f"share_embeddings_and_output_weights: Megatron ties rank 0 with rank {last}; the schedule has its "
            f"first stage on rank {problem.stages[0].device}, its last one on rank {problem.stages[-1].device}"
        )
    return [Chunk(chunk, s, s == 0, s == ends) for s, chunk in zip(numbers, chunks, strict=True)]


def _ties(chunk: nn.Module) -> bool:
    return any(getattr(part, "share_embeddings_and_output_weights", False) for part in chunk.modules())


def _require_supported(config: Any, chunks: Sequence[nn.Module]) -> None:
    for name, why in REFUSED.items():
        if getattr(config, name, None) not in (None, False):
            raise InputError(f"config.{name} = {getattr(config, name)}: {why}, so leave it off")
    if getattr(config, "cuda_graph_impl", "none") != "none":
        raise InputError(
            f"config.cuda_graph_impl = {config.cuda_graph_impl!r}: a captured graph has an order of its own"
        )
    if config.expert_model_parallel_size > 1:
        raise InputError(f"config.expert_model_parallel_size = {config.expert_model_parallel_size}: it must be 1")
    for chunk in chunks:
        options = getattr(chunk, "ddp_config", None)
        for name in ("overlap_grad_reduce", "use_megatron_fsdp"):
            if getattr(options, name, False):
                raise InputError(
                    f"ddp_config.{name} is on: it needs every weight gradient in autograd's own backward, "
                    "and here they come with W"
                )
