"""Exported schedules in the training stacks of others, on small Llamas of torchtitan and NeMo AutoModel, by their own
builders and on CPUs: ten steps have the losses of those stacks' own 1F1B. And what `optpipe plan` writes for other
stacks, given to their own readers, and models built by it.

`make stacks` runs it, each test in an environment with the package that it names. Megatron's flags are read by
megatron-core 0.19.2; with 0.16.1, whose package has no reader, where MEGATRON_LM is a checkout of Megatron-LM.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support import tables
from support.problems.published import published
from support.ranks.worker import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from optpipe import export_schedule
from optpipe.transformer.estimate import estimate
from optpipe.transformer.presets import GPUS
from optpipe.transformer.records import Parallelism, Run, Transformer
from optpipe_solver.planner import settings
from optpipe_solver.planner.candidate import Candidate
from optpipe_solver.systems import generate

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


pytestmark = [pytest.mark.stacks, pytest.mark.filterwarnings("ignore")]  # of what their imports lack here
LAYERS = {"torchtitan": 6, "automodel": 8}  # of the models that the ranks train


class Case(NamedTuple):
    """A division for two ranks, with a published schedule for it."""

    method: str
    chunks: int
    shape: str
    layers: tuple[int, ...] | None

    def candidate(self, layers: int, recompute: str = "none") -> Candidate:
        model = Transformer(layers=layers, hidden=64, ffn=256, heads=4, vocabulary=512, sequence=LENGTH)
        division = {"pp": 2, "chunks": self.chunks, "shape": self.shape, "layers": self.layers}
        run = Run.from_dict({"microbatches": MICROBATCHES, "recompute": recompute})
        made = Candidate(estimate(model, Parallelism.from_dict(division), GPUS["H100"], run))
        made.schedule = generate(self.method, made.problem)
        return made


def cases(layers: int) -> list[Case]:
    """Even and odd divisions; with a stage that has the head alone, and one that has only the embedding."""
    return [
        Case("1f1b", 1, "looped", None),
        Case("zb-h1", 1, "looped", (layers - 1, 1)),
        Case("interleaved", 2, "looped", (0, 2, layers - 3, 1)),
        Case("interleaved", 3, "looped", (1, 1, 1, 1, layers - 4, 0)),
        Case("zb-v", 2, "v", (1, 2, layers - 4, 1)),
    ]


def titan(flags: list[str]) -> Any:
    """What torchtitan reads."""
    from torchtitan.config import ConfigManager

    words = shlex.split("\n".join(flags))
    return ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel", *words])


def sizes(read: Any) -> tuple[int, int, int]:
    """A sequence's and a step's tokens, and the micro-batches of a pipeline, in either of torchtitan's forms."""
    training, parallelism = read.training, read.parallelism
    pipeline = parallelism.pipeline_parallel_degree > 1
    if hasattr(training, "seq_len"):
        count = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size if pipeline else 1
        return training.seq_len, training.global_batch_size * training.seq_len, count
    length, tokens = training.max_context_length, training.num_tokens_per_microbatch_per_dp_rank
    assert tokens % length == 0
    return length, training.num_tokens_per_train_step, parallelism.num_pp_microbatches if pipeline else 1


def read_titan(candidate: Candidate, csv: str) -> Config:
    read = titan(settings.torchtitan(candidate, csv, *settings.torchtitans().values()))
    parallelism = read.parallelism
    assert parallelism.pipeline_parallel_degree == 2
    assert sizes(read) == (LENGTH, MICROBATCHES * LENGTH, MICROBATCHES)
    assert read.activation_checkpoint is None
    return Config(
        parallelism.pipeline_parallel_schedule,
        parallelism.pipeline_parallel_schedule_csv,
        parallelism.module_fqns_per_model_part,
    )


def nemo(lines: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The YAML, and what AutoModel reads of its distributed section."""
    import yaml
    from nemo_automodel.recipes._dist_utils import parse_distributed_section

    content = yaml.safe_load("\n".join(lines))
    return content, parse_distributed_section(content["distributed"])


def read_automodel(candidate: Candidate, csv: str) -> Config:
    content, read = nemo(settings.nemo(candidate, csv))
    pipeline = read["pipeline_config"]
    assert read["pp_size"] == 2
    assert content["step_scheduler"]["local_batch_size"] == pipeline.pp_batch_size == MICROBATCHES
    return Config(pipeline.pp_schedule, pipeline.pp_schedule_csv, pipeline.module_fqns_per_model_part)


@pytest.mark.parametrize("stack", LAYERS)
def test_models_train_as_the_settings_divide_them(stack: str, ranks: Ranks, tmp_path: Path) -> None:
    """Ten steps have the losses of the stack's own division and 1F1B, so all layers and the head are there."""
    read: Callable[[Candidate, str], Config] = {"torchtitan": read_titan, "automodel": read_automodel}[stack]
    configs = [Config("1F1B", None)]
    for n, case in enumerate(cases(LAYERS[stack])):
        candidate = case.candidate(LAYERS[stack])
        assert candidate.schedule
        path = tmp_path / f"{n}.csv"
        path.write_text(export_schedule(candidate.schedule, "torch-csv"))
        configs.append(read(candidate, str(path)))
    by_rank = ranks({"torchtitan": torchtitan, "automodel": automodel}[stack], timeout=3000, configs=configs)
    theirs, *ours = (max(losses) for losses in zip(*by_rank, strict=True))  # one rank has them
    assert [len(losses) for losses in theirs] == [MICROBATCHES] * STEPS
    for config, losses in zip(configs[1:], ours, strict=True):
        for step, expected in zip(losses, theirs, strict=True):
            assert step == pytest.approx(expected, abs=1e-5), config


def others() -> Iterator[Candidate]:
    """With replicas, tensor and context parallelism, experts, full recomputation and ZeRO 3."""
    shape = Transformer(layers=6, hidden=64, ffn=256, heads=4, vocabulary=512, sequence=128, tied=True)
    experts = {"experts": 8, "experts_per_token": 2, "expert_ffn": 32}
    for division, more in (
        ({"dp": 4, "zero": 1}, {}),
        ({"dp": 2, "zero": 3, "cp": 2}, {}),
        ({"tp": 2, "dp": 2, "pp": 2, "zero": 1}, {}),
        ({"dp": 4, "ep": 4, "zero": 1}, experts),
    ):
        for recompute in ("none", "full"):
            model = Transformer.from_dict(shape.model_dump() | more)
            sent = {"overlap": "all", "dispatch": "once", "precision": "fp8"} if recompute == "none" else {}
            run = Run.from_dict({"microbatches": 4, "microbatch_size": 2, "recompute": recompute} | sent)
            candidate = Candidate(estimate(model, Parallelism.from_dict(division), GPUS["H100"], run))
            candidate.schedule = generate("1f1b", candidate.problem)
            yield candidate


def test_torchtitan_reads_all_flags() -> None:
    for candidate in others():
        division, run = candidate.estimate.parallelism, candidate.estimate.run
        read = titan(settings.torchtitan(candidate, "s.csv", *settings.torchtitans().values()))
        parallelism = read.parallelism
        assert parallelism.tensor_parallel_degree == division.tp
        assert parallelism.context_parallel_degree == division.cp
        assert parallelism.expert_parallel_degree == division.ep
        assert parallelism.data_parallel_shard_degree == division.dp
        assert parallelism.fsdp_reshard_after_forward == ("always" if division.zero == 3 else "never")
        assert sizes(read) == (128, 8 * division.dp * 128, 4 if division.pp > 1 else 1)
        assert (read.activation_checkpoint is not None) == (run.recompute == "full")


def test_automodel_reads_all_lines() -> None:
    for candidate in others():
        division, run = candidate.estimate.parallelism, candidate.estimate.run
        content, read = nemo(settings.nemo(candidate, "s.csv"))
        assert [read[f"{name}_size"] for name in ("tp", "pp", "cp", "ep")] == [
            getattr(division, name) for name in ("tp", "pp", "cp", "ep")
        ]
        assert read["strategy_config"].reshard_after_forward == (division.zero == 3)
        assert read["activation_checkpointing"] == (run.recompute == "full")
        assert content["step_scheduler"]["global_batch_size"] == 8 * division.dp
        assert (read["pipeline_config"] is None) == (division.pp == 1)


def test_automodel_refuses_tied_models_in_a_pipeline() -> None:
    """So the plan has none."""
    from nemo_automodel.components.distributed.pipelining.hf_utils import validate_hf_model_for_pipeline_support
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    for tied in (False, True):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=tied, **sizes))
        if tied:
            with pytest.raises(ValueError, match="does not support tie_word_embeddings"):
                validate_hf_model_for_pipeline_support(model)
        else:
            validate_hf_model_for_pipeline_support(model)


MEGATRON_READS = """
import json, os, sys, typing, typing_extensions
typing.override = typing_extensions.override  # Python 3.11 has none
sys.path.append(os.environ.get("MEGATRON_LM", ""))
from megatron.core import utils
from megatron.training import arguments
from optpipe_runtime.megatron.options import require_supported
from packaging.version import Version
utils.get_te_version = lambda: Version("2.10")  # it is not installed
arguments.get_device_arch_version = lambda: 9  # asks CUDA, as does the next
arguments.torch.cuda.get_device_capability = lambda: (9, 0)
for gpus, words in json.load(sys.stdin):
    os.environ["WORLD_SIZE"], sys.argv = str(gpus), ["train", *words]
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8" if "--use-megatron-fsdp" in words else "1"
    read = arguments.validate_args(arguments.parse_args())
    layout = read.pipeline_model_parallel_layout  # a config of experts needs TransformerEngine's kernels
    if layout:
        config = arguments.core_transformer_config_from_args(read)
        if not (read.tp_comm_overlap or read.fp8):  # that Megatron's own functions run
            require_supported(config, "config")
        layout = config.pipeline_model_parallel_layout
    stages = [len(chunk) for rank in layout.layout for chunk in rank] if layout else None
    sizes = [
        read.tensor_model_parallel_size, read.pipeline_model_parallel_size, read.context_parallel_size,
        read.expert_model_parallel_size, read.data_parallel_size, read.virtual_pipeline_model_parallel_size or 1,
        read.global_batch_size // read.micro_batch_size // read.data_parallel_size,
    ]
    flags = [
        read.recompute_granularity, bool(read.use_distributed_optimizer),
        bool(read.untie_embeddings_and_output_weights), read.overlap_grad_reduce,
        read.overlap_param_gather, bool(read.tp_comm_overlap), bool(read.use_megatron_fsdp),
        read.fp8, read.moe_token_dispatcher_type if read.num_experts else None, bool(read.moe_grouped_gemm),
    ]
    print("READ", json.dumps([*sizes, *flags, stages]))
"""


def has_reader() -> bool:
    if "MEGATRON_LM" in os.environ:
        return True
    try:
        return find_spec("megatron.training") is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.skipif(not has_reader(), reason="MEGATRON_LM is no checkout of Megatron-LM")
def test_megatron_reads_all_flags() -> None:
    model = "--num-layers 6 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 128 --bf16 --swiglu"
    divided = [case.candidate(6) for case in cases(6) if case.method in ("1f1b", "interleaved")]
    asked, expected = [], []
    for candidate in (*divided, *others()):
        division, shape, run = candidate.estimate.parallelism, candidate.estimate.shape, candidate.estimate.run
        experts = f"--num-experts {shape.experts} --moe-router-topk 2 --moe-ffn-hidden-size 32" if shape.experts else ""
        asked.append((division.gpus, shlex.split("\n".join((model, experts, *settings.megatron(candidate))))))
        counts = [len(pieces) for pieces in candidate.estimate.stages]
        by_rank = [
            counts[chunk * division.pp + rank] for rank in range(division.pp) for chunk in range(division.chunks)
        ]
        sizes = (division.tp, division.pp, division.cp, division.ep, division.dp, division.chunks, run.microbatches)
        flags = ["full" if run.recompute == "full" else None, division.zero > 0, not shape.tied]
        replicas = run.overlap != "none" and division.dp * division.cp > 1
        flags += [replicas, replicas and division.zero > 0, run.overlap == "all" and division.tp > 1]
        flags += [division.zero == 3, "hybrid" if run.precision == "fp8" else None]
        flags += ["flex" if run.dispatch == "once" else "alltoall", True] if shape.experts else [None, False]
        expected.append([*sizes, *flags, by_rank if division.pp > 1 else None])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEGATRON_READS],
        env=os.environ | {"RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line.removeprefix("READ ")) for line in done.stdout.splitlines() if line.startswith("READ ")]
    assert found == expected


# Which of torch's schedules places the stages as ours does.
PLACED_BY = {"zb-h1": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("train", [torchtitan, automodel], ids=["torchtitan", "automodel"])
def test_ten_steps_by_their_own_builders(train: Callable[..., Any], ranks: Ranks, tmp_path: Path) -> None:
    configs = [Config("1F1B", None)]
    for case in published(ranks.world, (MICROBATCHES,)):
        if case.name in PLACED_BY:
            path = tmp_path / f"{case.name}.csv"
            path.write_text(export_schedule(case.schedule, "torch-csv"))
            configs.append(Config(PLACED_BY[case.name], str(path)))
    assert len(configs) == 1 + len(PLACED_BY)

    by_config = [
        max(losses) for losses in zip(*ranks(train, timeout=3000, configs=configs), strict=True)
    ]  # one rank has them
    theirs, ours = by_config[0], by_config[1:]
    assert [len(losses) for losses in theirs] == [MICROBATCHES] * STEPS
    assert sum(theirs[-1]) < sum(theirs[0]), "it has learned"
    for config, losses in zip(configs[1:], ours, strict=True):
        name = Path(config.csv or "").stem
        difference = max(
            abs(a - b) for one, other in zip(losses, theirs, strict=True) for a, b in zip(one, other, strict=True)
        )
        tables.note(name, ranks.world, "torch-csv", difference)
        assert difference < 1e-5, name
