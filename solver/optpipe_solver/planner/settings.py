"""The settings of other stacks that make a candidate: torchtitan from 0.3.0, NeMo AutoModel 0.7.0, Megatron-LM 0.16.1.

`make stacks` gives them to those programs' own readers, and builds models by them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from shlex import quote

from optpipe.formats import megatron as arguments
from optpipe.formats import modules
from optpipe.formats.torch_csv import schedule_placing
from optpipe.transformer.estimate import Estimate
from optpipe.transformer.records import ModuleNames, Precision, Transformer
from optpipe_solver.planner.candidate import Candidate

CONFIGS = "config/configs.py"  # of torchtitan
OPTIONAL = ("cp", "ep")  # degrees that are written only where they divide something
TORCHTITAN = {
    "tp": "--parallelism.tensor_parallel_degree",
    "pp": "--parallelism.pipeline_parallel_degree",
    "dp": "--parallelism.data_parallel_shard_degree",
    "cp": "--parallelism.context_parallel_degree",
    "ep": "--parallelism.expert_parallel_degree",
}
SEQUENCES = {"sequence": "--training.seq_len", "batch": "--training.global_batch_size"}
TOKENS = {  # since August 2026, after 0.3.0
    "sequence": "--training.max_context_length",
    "tokens": "--training.num_tokens_per_microbatch_per_dp_rank",
    "all_tokens": "--training.num_tokens_per_train_step",
}
NEMO_STEP = {"batch": "  global_batch_size:"}
NEMO = {"tp": "  tp_size:", "pp": "  pp_size:", "cp": "  cp_size:", "ep": "  ep_size:"}
MEGATRON = {
    "tp": "--tensor-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "size": "--micro-batch-size",
    "batch": "--global-batch-size",
    "sequence": "--seq-length",
}
# Of a precision Megatron-LM's flags, and Megatron-Bridge's recipe; matmuls of fewer bits beside 16.
PRECISIONS: dict[Precision, tuple[str, str]] = {
    "fp32": ("", "fp32"),
    "bf16": ("--bf16", "bf16_mixed"),
    "fp8": ("--bf16 --fp8-format hybrid --fp8-recipe tensorwise", "bf16_with_fp8_current_scaling_mixed"),
    "mxfp8": ("--bf16 --fp8-format e4m3 --fp8-recipe mxfp8", "bf16_with_mxfp8_mixed"),
    "nvfp4": ("--bf16 --fp4-format e2m1 --fp4-recipe nvfp4", "bf16_with_nvfp4_mixed"),
}
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor"
NODE = 8  # GPUs of a node over which DeepEP sends, HybridEP over a larger domain
BRIDGE = {
    "--ckpt-format": "checkpoint.ckpt_format",
    "--data-parallel-sharding-strategy": "ddp.data_parallel_sharding_strategy",
    "--overlap-grad-reduce": "ddp.overlap_grad_reduce",
    "--overlap-param-gather": "ddp.overlap_param_gather",
    "--tp-comm-overlap": "comm_overlap.tp_comm_overlap",
    "--overlap-moe-expert-parallel-comm": "comm_overlap.overlap_moe_expert_parallel_comm",
    "--delay-wgrad-compute": "comm_overlap.delay_wgrad_compute",
    "--use-megatron-fsdp": "ddp.use_megatron_fsdp",
    "--grad-reduce-in-bf16": "mixed_precision.grad_reduce_in_fp32",
    "--micro-batch-size": "train.micro_batch_size",
    "--global-batch-size": "train.global_batch_size",
    "--use-distributed-optimizer": "ddp.use_distributed_optimizer",
    "--untie-embeddings-and-output-weights": "model.share_embeddings_and_output_weights",
    "--num-virtual-stages-per-pipeline-rank": "model.virtual_pipeline_model_parallel_size",
    "--microbatch-group-size-per-virtual-pipeline-stage": "model.microbatch_group_size_per_vp_stage",
}
OPPOSITE = {"--grad-reduce-in-bf16", "--untie-embeddings-and-output-weights"}  # of what Bridge's option says
LISTS = ("--offload-modules", "--recompute-modules")
# What a recipe may have, and a plan has not unless it is written.
RECIPE = {
    "model.pipeline_model_parallel_size": "1",
    "model.sequence_parallel": "false",
    "model.context_parallel_size": "1",
    "model.virtual_pipeline_model_parallel_size": "null",
    "model.pipeline_model_parallel_layout": "null",
    "model.num_layers_in_first_pipeline_stage": "null",  # refused beside a layout, as the next three are
    "model.num_layers_in_last_pipeline_stage": "null",
    "model.account_for_embedding_in_pipeline_split": "false",
    "model.account_for_loss_in_pipeline_split": "false",
    "model.mtp_num_layers": "null",
    "model.recompute_granularity": "null",
    "model.fine_grained_activation_offloading": "false",
}
RECIPE_OF_EXPERTS = {
    "model.expert_model_parallel_size": "1",
    "model.expert_tensor_parallel_size": "null",  # tp
    "model.moe_shared_expert_overlap": "false",
    "model.moe_expert_capacity_factor": "null",
    "model.moe_pad_expert_input_to_capacity": "false",
    "comm_overlap.overlap_moe_expert_parallel_comm": "false",
    "comm_overlap.delay_wgrad_compute": "false",
}


def torchtitan(candidate: Candidate, csv: str, tokens: bool = False) -> list[str]:
    """Return its flags, the last ones of a command; `csv` is the file with the schedule's compute actions
    (docs/stacks.md). `tokens`: those since August 2026, which count tokens.

    It divides layers in its own way unless it gets the modules of each stage. What is recomputed is a subcommand,
    after which no other flag is read.
    """
    estimate = candidate.estimate
    parallelism, run = estimate.parallelism, estimate.run
    if run.lora:
        return [f"# no flags: torchtitan has LoRA in configurations in Python only (rank {run.lora})"]
    flags = _numbers(estimate, TORCHTITAN | (TOKENS if tokens else SEQUENCES))
    flags += [] if tokens else [f"--training.local_batch_size {_local_batch(estimate)}"]
    if parallelism.dp * parallelism.cp > 1:  # FSDP's ranks
        flags.append(f"--parallelism.fsdp_reshard_after_forward {'always' if parallelism.zero == 3 else 'never'}")
    if parallelism.pp > 1 or parallelism.ep > 1:
        flags.append("--training.disable_cuda_graphs")
    if parallelism.pp > 1:
        parts = " ".join(",".join(names) for names in _parts(estimate, modules.TORCHTITAN))
        flags += [
            f"--parallelism.num_pp_microbatches {run.microbatches}"
            if tokens
            else f"--parallelism.pipeline_parallel_microbatch_size {run.microbatch_size}",
            f"--parallelism.pipeline_parallel_schedule {schedule_placing(parallelism.chunks, parallelism.shape)}",
            f"--parallelism.pipeline_parallel_schedule_csv {csv}",
            f"--parallelism.module_fqns_per_model_part {parts}",
        ]
    return [*flags, f"activation-checkpoint:{'full' if run.recompute == 'full' else 'none'}"]


def torchtitans() -> dict[str, bool]:
    """By name whether flags count tokens: of the installed torchtitan, whose main branch calls itself 0.2.2, or of
    both if there is none."""
    found = find_spec("torchtitan")
    configs = [path for each in (found and found.submodule_search_locations) or () for path in Path(each).glob(CONFIGS)]
    if configs:
        return {"torchtitan": any("num_pp_microbatches" in path.read_text() for path in configs)}
    return {"torchtitan 0.3.0": False, "torchtitan-main since August 2026": True}


def nemo(candidate: Candidate, csv: str) -> list[str]:
    """Return the lines of a recipe's YAML. Its pipelines know modules by the names that most models of transformers
    have; for others there is only a comment."""
    estimate = candidate.estimate
    parallelism, run, own = estimate.parallelism, estimate.run, estimate.shape.modules
    lines = []
    if parallelism.pp > 1 and own not in (None, modules.AUTOMODEL):
        named, known = (", ".join((*each.first, f"{each.layer}.N", *each.last)) for each in (own, modules.AUTOMODEL))
        return [f"# no settings: the model's modules are {named}, pipelines of AutoModel take {known}"]
    if parallelism.pp > 1 and estimate.shape.window:
        lines.append(
            f"# AutoModel 0.7.0 drops the window of {estimate.shape.window} tokens in a pipeline: outputs are wrong"
        )
    lines += [
        *("step_scheduler:", *_numbers(estimate, NEMO_STEP), f"  local_batch_size: {_local_batch(estimate)}"),
        *("distributed:", "  strategy: fsdp2", *_numbers(estimate, NEMO)),
    ]
    if parallelism.dp * parallelism.cp > 1:  # FSDP's ranks
        lines.append(f"  reshard_after_forward: {'true' if parallelism.zero == 3 else 'false'}")
    if parallelism.tp > 1:
        lines.append("  sequence_parallel: true")
    if run.recompute == "full":
        lines.append("  activation_checkpointing: true")
    if parallelism.pp > 1:
        lines += [
            "  pipeline:",
            f"    pp_schedule: {schedule_placing(parallelism.chunks, parallelism.shape)}",
            f"    pp_schedule_csv: {csv}",
            f"    pp_microbatch_size: {run.microbatch_size}",
            f"    pp_batch_size: {run.microbatches * run.microbatch_size}",
            "    module_fqns_per_model_part:",
            *(f"    - [{', '.join(names)}]" for names in _parts(estimate, modules.AUTOMODEL)),
        ]
    target = "  _target_: nemo_automodel.components._peft.lora.PeftConfig"
    return [*lines, *["peft:", target, "  match_all_linear: true", f"  dim: {run.lora}"][: 4 * (run.lora > 0)]]


def megatron(candidate: Candidate) -> list[str]:
    """Return its flags, or a comment if it has none. It runs a schedule of its own: 1F1B, with chunks interleaved
    or combined 1F1B.

    What its default is not, and the estimate counts, is among them, such as what is sent beside computing.
    """
    rank = candidate.estimate.run.lora
    return [f"# no flags: Megatron-LM has no LoRA, Megatron-Bridge has (rank {rank})"] if rank else _megatron(candidate)


def _megatron(candidate: Candidate) -> list[str]:
    estimate = candidate.estimate
    parallelism, run = estimate.parallelism, estimate.run
    flags = _numbers(estimate, MEGATRON)
    if parallelism.pp > 1 and candidate.schedule:
        letters = hybrid_letters(estimate.shape) if estimate.shape.parts else ()
        flags += arguments.write(candidate.schedule, run.mtp, letters).splitlines()
    elif candidate.schedule:
        flags += arguments.pair_arguments(candidate.schedule) + arguments.offload_arguments(candidate.schedule)
    flags += [f"--mtp-num-layers {run.mtp}"] if run.mtp and parallelism.pp == 1 else []
    flags += [f"--expert-tensor-parallel-size {parallelism.etp}"] if parallelism.etp else []
    flags += ["--sequence-parallel"] if parallelism.tp > 1 else []
    flags += ["--tp-comm-overlap"] if parallelism.tp > 1 and run.overlap in ("all", "experts") else []
    flags += ["--use-distributed-optimizer"] if parallelism.zero else []
    flags += [FSDP] if parallelism.zero == 3 else []
    if run.overlap != "none" and parallelism.dp * parallelism.cp > 1:
        flags.append(f"--overlap-grad-reduce{' --overlap-param-gather' if parallelism.zero else ''}")
    flags += ["--grad-reduce-in-bf16"] if run.gradient_bytes == 2 else []
    if estimate.shape.experts:
        backend = "deepep" if estimate.gpu.gpus_per_node <= NODE else "hybridep"
        once = run.dispatch == "once"
        sends = f"flex --moe-flex-dispatcher-backend {backend}" if once and parallelism.ep > 1 else "alltoall"
        flags.append(f"--moe-token-dispatcher-type {sends}")
        flags.append(f"--moe-grouped-gemm{' --moe-permute-fusion' if once else ''}")
        factor = run.moe_expert_capacity_factor
        flags += [f"--moe-expert-capacity-factor {factor:g}"] if factor else []
        flags += ["--moe-pad-expert-input-to-capacity"] if run.moe_pad_expert_input_to_capacity else []
    flags += [] if estimate.shape.tied else ["--untie-embeddings-and-output-weights"]
    flags += ["--attention-backend unfused"] if run.attention == "unfused" else []
    if run.recompute == "full":
        flags.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    elif run.recompute != "none":
        modules = f" --recompute-modules layernorm{' moe_act' * (estimate.shape.experts > 0)}"
        flags.append(f"--recompute-granularity selective{modules * (run.recompute == 'cheap')}")
    flags += [PRECISIONS[run.precision][0]] if run.precision != "fp32" else []
    return flags


def bridge(candidate: Candidate) -> list[str]:
    """Return the same as overrides of a Megatron-Bridge recipe, whose options have other names."""
    run, chunks = candidate.estimate.run, candidate.estimate.parallelism.chunks
    words = shlex.split(" ".join(_megatron(candidate)).removesuffix(PRECISIONS[run.precision][0]))
    lines = [f"mixed_precision={PRECISIONS[run.precision][1]}"] if run.precision != "fp32" else []
    for name, value in options_of(words).items():
        option = BRIDGE.get(f"--{name}", f"model.{name.replace('-', '_')}")
        given = quote(f"[{value.replace(' ', ',')}]" if f"--{name}" in LISTS else value)
        lines.append(f"{option}={'false' if f'--{name}' in OPPOSITE else given}")
    lines += [f"{BRIDGE['--num-virtual-stages-per-pipeline-rank']}={chunks}"] * (chunks > 1)
    lines += [f"dataset.seq_length={candidate.estimate.sequence}", *[f"peft.dim={run.lora}"] * (run.lora > 0)]
    written = {line.partition("=")[0] for line in lines}
    reset = RECIPE | (RECIPE_OF_EXPERTS if candidate.estimate.shape.experts else {})
    return [*lines, *(f"{option}={value}" for option, value in reset.items() if option not in written)]


def options_of(words: Iterable[str]) -> dict[str, str]:
    """The words behind each option, `true` if there are none; names without dashes before and with them for _."""
    behind, words_behind = dict[str, list[str]](), list[str]()
    for word in words:
        if word.startswith("--"):
            words_behind = behind[word[2:].replace("_", "-")] = []
        else:
            words_behind.append(word)
    return {name: " ".join(values) or "true" for name, values in behind.items()}


def hybrid_letters(shape: Transformer) -> list[str]:
    """Each layer in letters of `--hybrid-layer-pattern` (Megatron-core 0.19): G a gated delta rule, + latent keys."""
    mixer, attention = shape.state_space, "+" if shape.kv_latent else "*"
    letters = str.maketrans({"M": "G" if mixer and mixer.kind == "delta" else "M", "*": attention})
    return [shape.parts_of(i).translate(letters) for i in range(shape.layers)]


def _parts(estimate: Estimate, names: ModuleNames) -> list[list[str]]:
    """The modules of each stage."""
    return modules.parts_of(names, [sum(estimate.pieces[i].is_layer for i in stage) for stage in estimate.stages])


def _local_batch(estimate: Estimate) -> int:
    """What a replica is given at once: without a pipeline one micro-batch."""
    parallelism, run = estimate.parallelism, estimate.run
    return run.microbatch_size * (run.microbatches if parallelism.pp > 1 else 1)


def _numbers(estimate: Estimate, names: dict[str, str]) -> list[str]:
    """Return degrees of parallelism, micro-batch, batch and sequence, as far as the stack has names for them."""
    parallelism, run = estimate.parallelism, estimate.run
    batch = run.microbatches * run.microbatch_size * parallelism.dp
    numbers = {
        **{name: getattr(parallelism, name) for name in ("tp", "pp", "dp", "cp", "ep")},
        "size": run.microbatch_size,
        "batch": batch,
        "sequence": estimate.sequence,
        "tokens": run.microbatch_size * estimate.sequence,
        "all_tokens": batch * estimate.sequence,
    }
    return [f"{names[name]} {n}" for name, n in numbers.items() if name in names and (n > 1 or name not in OPTIONAL)]
