"""What a change is called, and the lines that make it, for each stack."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Literal, get_args

from optpipe.diagnose.batches import Change
from optpipe.diagnose.losses import Losses
from optpipe.diagnose.runs import Runs
from optpipe.errors import OptPipeError
from optpipe.formats import export, megatron
from optpipe.formats.torch_csv import schedule_placing
from optpipe.model.placement import Placement
from optpipe.schedule import Schedule

Stack = Literal["torch", "megatron", "primus", "optpipe"]
STACKS: tuple[Stack, ...] = get_args(Stack)
STACK_OF_FORM: dict[str, Stack] = {
    "torch-trace": "torch",
    "primus": "primus",
    "straggler": "megatron",
    "megatron-timers": "megatron",
    "csv": "optpipe",
}
# Published schedules that a stack runs, by their names there.
NAMES: dict[Stack, dict[str, str]] = {
    "torch": {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble", "dualpipe-v": "DualPipeV"},
    "megatron": {"1f1b": "1F1B", "interleaved": "interleaved 1F1B"},
    "primus": {"1f1b": "1F1B", "interleaved": "interleaved 1F1B"},
    "optpipe": {"1f1b": "1F1B", "interleaved": "interleaved 1F1B", "zb-h1": "ZB-H1", "zb-h2": "ZB-H2", "zb-v": "ZB-V"},
}
FILES: dict[Stack, tuple[str, str]] = {  # what reads a schedule of ours: how the name ends, and the form
    "torch": (".csv", "torch-csv"),
    "megatron": (".json", "json"),
    "primus": (".primus.json", "primus"),
    "optpipe": (".json", "json"),
}
MOST_NAMED = 3  # devices in one sentence


def lines_of(
    change: Change, runs: Runs, losses: Losses, stack: Stack, layered: bool, file: str
) -> tuple[str, tuple[str, ...]]:
    """What a change is called, and the lines that make it. Raises OptPipeError if the stack cannot express it.

    `layered` is whether the layers of stages are known, `file` the name of the file with a schedule of ours.
    """
    titles, lines = list[str](), list[str]()
    if change.healthy:
        where = [f"device {each.device} of replica {each.replica}" for each in losses.slow_devices]
        more = f" and {len(where) - MOST_NAMED} more" if len(where) > MOST_NAMED else ""
        titles.append(f"replace {', '.join(where[:MOST_NAMED])}{more}")
        lines.append("in the launcher: leave the host of this device out, such as srun --exclude=HOST")
    if change.entry == "spread":
        titles.append("spread the micro-batches of a step over the replicas by their work")
        lines.append(f"in the data loader: optpipe.steps.assign(batch, replicas={len(runs.replicas)}).microbatches")
    if change.entry == "order":
        titles.append("let the micro-batches of a replica enter in another order")
        lines.append("in the data loader: optpipe.steps.assign(batch, replicas=1).microbatches[0]")
    if change.own_schedules:
        titles.append("give each replica a schedule for its micro-batches in every step")
        lines.append("in the training: optpipe.steps.StepScheduler")
    if change.placement and change.placement.layers and change.schedule is None:
        titles.append(f"divide the layers anew: {' '.join(map(str, change.placement.layers))}")
        lines += _layers(change.placement, stack)
    if change.schedule:
        placement = change.schedule.placement
        if placement and not layered:
            placement = placement.model_copy(update={"layers": None})
        name = NAMES[stack].get(change.schedule.method, "a schedule of OptPipe")
        titles.append(f"run {name}{f' with {placement}' if placement else ''}")
        lines += _schedule_lines(change.schedule, stack, layered, file)
    return "; ".join(titles), tuple(lines)


def file_of(schedule: Schedule, stack: Stack, name: str) -> tuple[str, str] | None:
    """The name and the text of the file with a schedule, for the cure of this name; None for one that the stack has."""
    if schedule.method in NAMES[stack]:
        return None
    ending, form = FILES[stack]
    try:
        return name + ending, export(schedule, form).text
    except OptPipeError:
        return f"{name}.json", export(schedule, "json").text


def _schedule_lines(schedule: Schedule, stack: Stack, layered: bool, file: str) -> list[str]:
    published, placement = NAMES[stack].get(schedule.method), schedule.placement
    layers = _layers(placement, stack) if placement and layered else []
    if stack == "torch":
        chunks = len(schedule.problem.stages) // len(schedule.problem.devices)
        name = published or schedule_placing(chunks, placement.shape if placement else "looped")
        more = [] if published else [f"--parallelism.pipeline_parallel_schedule_csv {file}"]
        return [f"--parallelism.pipeline_parallel_schedule {name}", *more, *layers]
    if stack in ("megatron", "primus") and published:
        plain = schedule if layered else replace(schedule, problem=schedule.problem.replace(layers=None))
        return [line for line in megatron.write(plain).splitlines() if "-layout" not in line] + layers
    if stack == "primus":
        return [f"run the table {file} (docs/primus.md)", *layers]
    if stack == "megatron":
        return [f"optpipe_runtime.megatron.forward_backward_func runs {file} (docs/megatron.md)", *layers]
    return [f"optpipe_runtime.Pipeline runs {file} (docs/training.md)"]


def _layers(placement: Placement, stack: Stack) -> list[str]:
    """The layers of each stage, of which the first is the embedding and the last the head."""
    counts = placement.layers or ()
    if stack in ("megatron", "primus"):
        return [f"--pipeline-model-parallel-layout {megatron.layout_of_counts(counts)}"]
    if stack == "torch":
        cuts = [0, *accumulate(counts)]
        names = ["tok_embeddings", *(f"layers.{n}" for n in range(cuts[-1] - 2)), "norm,lm_head"]
        parts = " ".join(",".join(names[a:b]) for a, b in pairwise(cuts))
        return [f"--parallelism.module_fqns_per_model_part {parts}"]
    return [f"stages of {' '.join(map(str, counts))} layers, with the embedding and the head"]
