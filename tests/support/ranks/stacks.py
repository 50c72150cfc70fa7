"""What ranks run in `test_stacks`: small Llamas of torchtitan and of NeMo AutoModel, split and scheduled by their own
builders, on CPUs. The packages are there in the environments of `make stacks` only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

MICROBATCHES, STEPS, LENGTH, WORDS = 8, 10, 32, 256


class Config(NamedTuple):
    """The entries of a config that choose a schedule: a name of torch's, which also places the stages, a file, and the
    modules of each stage, if they are not left to the stack."""

    schedule: str
    csv: str | None
    modules: list[list[str]] | None = None


def torchtitan(configs: Sequence[Config]) -> list[list[list[float]]]:
    """The debug model of Llama 3 by `_pipeline_module_split` and `_build_pipeline_schedule`: losses by step.

    Their trainer and `pipeline_llm` make a mesh of CUDA devices, and attention by default has no backward on a CPU.
    """
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import ParallelDims, pipeline_parallel
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
    found = []
    for schedule, csv, modules in configs:
        parallelism = ParallelismConfig(
            pipeline_parallel_degree=ranks, pipeline_parallel_schedule=schedule, pipeline_parallel_schedule_csv=csv
        )
        model_config = model_registry("debugmodel").model
        for layer in model_config.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        torch.manual_seed(0)
        model = model_config.build()
        model.init_weights(buffer_device=torch.device("cpu"))
        dims = ParallelDims.from_config(parallelism, ranks)
        names = modules or pipeline_parallel._generate_llm_fqn_per_model_part(
            *pipeline_parallel._get_pipeline_metadata(dims, parallelism, model_config)
        )
        stages, parts = pipeline_parallel._pipeline_module_split(model, mesh, schedule, torch.device("cpu"), names)
        built = pipeline_parallel._build_pipeline_schedule(
            parallelism=parallelism,
            local_batch_size=MICROBATCHES,
            stages=stages,
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=model_config.vocab_size).build(),
        )
        tokens = torch.tensor(float(MICROBATCHES * LENGTH))

        def step(inputs: Tensor, **more: Any) -> None:
            given = [inputs] if any(stage.is_first for stage in stages) else []  # noqa: B023
            built.step(*given, loss_kwargs={"global_valid_tokens": tokens}, **more)  # noqa: B023

        found.append(_train(step, parts, any(stage.is_last for stage in stages)))
    return found


def automodel(configs: Sequence[Config]) -> list[list[list[float]]]:
    """A Llama of transformers by `AutoPipeline`: losses by step."""
    from nemo_automodel.components.distributed.pipelining import AutoPipeline
    from transformers import LlamaConfig, LlamaForCausalLM

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    found = []
    for schedule, csv, modules in configs:
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, use_cache=False, tie_word_embeddings=False, **sizes))
        pipeline = AutoPipeline(
            world_mesh=mesh,
            pp_schedule=schedule,
            pp_schedule_csv=csv,
            module_fqns_per_model_part=modules,
            pp_batch_size=MICROBATCHES,
            device=torch.device("cpu"),
            dtype=torch.float32,
            scale_grads_in_schedule=True,
        )
        pipeline.build(model, loss_fn=lambda output, target: functional.cross_entropy(output.mT, target))
        found.append(_train(pipeline.step, pipeline.parts, pipeline.info.has_last_stage))
    return found


def _train(step: Callable[..., Any], parts: Sequence[nn.Module], has_loss: bool) -> list[list[float]]:
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-3)
    found = []
    for n in range(STEPS):
        tokens = torch.randint(WORDS, (MICROBATCHES, LENGTH + 1), generator=torch.Generator().manual_seed(n))
        losses: list[Tensor] = []
        optimizer.zero_grad()
        step(tokens[:, :-1].contiguous(), target=tokens[:, 1:].contiguous() if has_loss else None, losses=losses)
        optimizer.step()
        found.append([loss.item() for loss in losses])
    return found
