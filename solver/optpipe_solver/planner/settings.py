"""The settings of other stacks that make a candidate: torchtitan, NeMo AutoModel, Megatron-LM."""

from __future__ import annotations

import json

from optpipe.formats.megatron import layout
from optpipe.transformer.estimate import Estimate
from optpipe_solver.planner.candidates import Candidate

OPTIONAL = ("cp", "ep")  # degrees that are told only where they divide something
TORCHTITAN = {
    "tp": "--parallelism.tensor_parallel_degree",
    "pp": "--parallelism.pipeline_parallel_degree",
    "dp": "--parallelism.data_parallel_shard_degree",
    "cp": "--parallelism.context_parallel_degree",
    "ep": "--parallelism.expert_parallel_degree",
    "sequence": "--training.seq_len",
    "batch": "--training.global_batch_size",
}
NEMO = {"tp": "  tp_size:", "pp": "  pp_size:", "cp": "  cp_size:", "ep": "  ep_size:"}
MEGATRON = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "size": "--micro-batch-size",
    "batch": "--global-batch-size",
    "sequence": "--seq-length",
}


def torchtitan(candidate: Candidate, csv: str) -> list[str]:
    """Return its flags; `csv` is the file with the schedule's compute actions (docs/stacks.md)."""
    estimate = candidate.estimate
    parallelism, run = estimate.parallelism, estimate.run
    flags = [
        *_numbers(estimate, TORCHTITAN),
        f"--training.local_batch_size {run.microbatch_size * (run.microbatches if parallelism.pp > 1 else 1)}",
        f"--activation_checkpoint.mode {'full' if run.recompute == 'full' else 'none'}",
    ]
    if parallelism.zero == 3:
        flags.append("--parallelism.fsdp_reshard_after_forward always")
    if parallelism.pp > 1:
        flags.append(f"--parallelism.pipeline_parallel_microbatch_size {run.microbatch_size}")
        flags.append(f"--parallelism.pipeline_parallel_schedule {_schedule(candidate)}")
        flags.append(f"--parallelism.pipeline_parallel_schedule_csv {csv}")
    if parallelism.layers or parallelism.chunks > 1 or estimate.shape.layers % parallelism.stages:
        parts = json.dumps(_layer_names(estimate), separators=(",", ":"))
        flags.append(f"--parallelism.module_fqns_per_model_part '{parts}'")
    return flags


def nemo(candidate: Candidate, csv: str) -> list[str]:
    """Return the lines of a recipe's YAML."""
    estimate = candidate.estimate
    parallelism, run = estimate.parallelism, estimate.run
    lines = ["distributed:", *_numbers(estimate, NEMO)]
    if parallelism.pp > 1:
        lines += [
            "  pipeline:",
            f"    pp_schedule: {_schedule(candidate)}",
            f"    pp_schedule_csv: {csv}",
            f"    pp_microbatch_size: {run.microbatch_size}",
            f"    pp_batch_size: {run.microbatches * run.microbatch_size}",
        ]
    return lines


def megatron(candidate: Candidate) -> list[str]:
    """Return its flags. It runs a schedule of its own: 1F1B, with chunks interleaved 1F1B."""
    estimate = candidate.estimate
    parallelism, run = estimate.parallelism, estimate.run
    flags = _numbers(estimate, MEGATRON)
    flags += ["--sequence-parallel"] if parallelism.tp > 1 else []
    flags += ["--use-distributed-optimizer"] if parallelism.zero else []
    if run.recompute == "full":
        flags.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    elif run.recompute == "selective":
        flags.append("--recompute-granularity selective")
    if parallelism.layers or estimate.shape.layers % parallelism.stages:  # Megatron takes one of the two, not both
        flags.append(f"--pipeline-model-parallel-layout '{layout(estimate.problem)}'")
    elif parallelism.chunks > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {parallelism.chunks}")
    return flags


def _schedule(candidate: Candidate) -> str:
    """Return the schedule of torch that places stages as these are."""
    parallelism = candidate.estimate.parallelism
    if parallelism.chunks == 1:
        return "1F1B"
    return "Interleaved1F1B" if parallelism.shape == "looped" else "ZBVZeroBubble"


def _numbers(estimate: Estimate, names: dict[str, str]) -> list[str]:
    """Return degrees of parallelism, micro-batch, batch and sequence, as far as the stack has names for them."""
    parallelism, run = estimate.parallelism, estimate.run
    numbers = {
        **{name: getattr(parallelism, name) for name in ("tp", "pp", "dp", "cp", "ep")},
        "size": run.microbatch_size,
        "batch": run.microbatches * run.microbatch_size * parallelism.dp,
        "sequence": estimate.sequence,
    }
    return [f"{names[name]} {n}" for name, n in numbers.items() if name in names and (n > 1 or name not in OPTIONAL)]


def _layer_names(estimate: Estimate) -> list[list[str]]:
    """Return the modules of each stage as torchtitan names them."""
    last = estimate.shape.layers + 1

    def name(piece: int) -> list[str]:
        return ["tok_embeddings"] if piece == 0 else ["norm", "output"] if piece == last else [f"layers.{piece - 1}"]

    return [[word for piece in pieces for word in name(piece)] for pieces in estimate.stages]
