"""What a change is called, and the lines that make it, for each stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from shlex import quote

from optpipe.diagnose.batches import Change
from optpipe.diagnose.losses import Losses
from optpipe.diagnose.runs import Runs
from optpipe.errors import OptPipeError
from optpipe.formats import export, megatron
from optpipe.formats.modules import TORCHTITAN, parts_of
from optpipe.formats.stacks import STACKS
from optpipe.formats.torch_csv import schedule_placing
from optpipe.options import StackName
from optpipe.schedule import Schedule

STACK_OF_FORM: dict[str, StackName] = {
    "torch-trace": "torch",
    "primus": "primus",
    "straggler": "megatron",
    "megatron-timers": "megatron",
    "csv": "optpipe",
}
MOST_NAMED = 3  # stages or devices in one sentence


def lines_of(
    change: Change, runs: Runs, losses: Losses, stack: StackName, layered: bool, file: str
) -> tuple[str, tuple[str, ...]]:
    """What a change is called, and the lines that make it. Raises OptPipeError if the stack cannot express it.

    `layered` is whether the layers of stages are known, `file` the name of the file with a schedule of ours.
    """
    titles, lines = list[str](), list[str]()
    if change.healthy:
        where = [f"device {each.device} of replica {each.replica}" for each in losses.slow_devices]
        titles.append(f"replace {some(where, 'devices')}")
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
        titles.append(f"divide the layers anew: {' '.join(map(str, _inner(change.placement.layers)))}")
        lines += _layers(change.placement.layers, stack)
    if change.schedule:
        placement = change.schedule.placement
        counts = placement.layers if placement and layered else None
        placed = placement and placement.model_copy(update={"layers": counts and _inner(counts)})
        name = STACKS[stack].own.get(change.schedule.method, "a schedule of OptPipe")
        titles.append(f"run {name}{f' with {placed}' if placed else ''}")
        lines += [*_schedule_lines(change.schedule, stack, layered, file), *(_layers(counts, stack) if counts else ())]
    return "; ".join(titles), tuple(lines)


def some(sentences: Sequence[str], what: str) -> str:
    """The first of them, and how many more of what there are."""
    more = f", and {len(sentences) - MOST_NAMED} more {what}" if len(sentences) > MOST_NAMED else ""
    return ", ".join(sentences[:MOST_NAMED]) + more


def file_of(schedule: Schedule, stack: StackName, name: str) -> tuple[str, str] | None:
    """The name and the text of the file with a schedule, for the cure of this name; None for one that the stack has."""
    if schedule.method in STACKS[stack].own:
        return None
    ending, form = STACKS[stack].file
    try:
        return name + ending, export(schedule, form).text
    except OptPipeError:
        return f"{name}.json", export(schedule, "json").text


def _schedule_lines(schedule: Schedule, stack: StackName, layered: bool, file: str) -> list[str]:
    published, placement = STACKS[stack].own.get(schedule.method), schedule.placement
    if stack == "torch":
        chunks = len(schedule.problem.stages) // len(schedule.problem.devices)
        name = published or schedule_placing(chunks, placement.shape if placement else "looped")
        more = [] if published else [f"--parallelism.pipeline_parallel_schedule_csv {file}"]
        return [f"--parallelism.pipeline_parallel_schedule {name}", *more]
    if stack in ("megatron", "primus") and published:
        plain = schedule if layered else replace(schedule, problem=schedule.problem.replace(layers=None))
        return [line for line in megatron.write(plain).splitlines() if "-layout" not in line]
    if stack == "primus":
        return [f"run the table {file} (docs/primus.md)"]
    if stack == "megatron":
        return [f"optpipe_runtime.megatron.forward_backward_func runs {file} (docs/megatron.md)"]
    return [f"optpipe_runtime.Pipeline runs {file} (docs/training.md)"]


def _inner(counts: Sequence[int]) -> tuple[int, ...]:
    """How many layers each stage has, without the embedding, which is the first, and the head, the last."""
    inner = list(counts)
    inner[0] -= 1
    inner[-1] -= 1
    return tuple(inner)


def _layers(counts: Sequence[int], stack: StackName) -> list[str]:
    if stack in ("megatron", "primus"):
        return [f"--pipeline-model-parallel-layout {quote(megatron.layout_of_counts(counts))}"]
    if stack == "torch":
        parts = " ".join(",".join(names) for names in parts_of(TORCHTITAN, _inner(counts)))
        return [f"--parallelism.module_fqns_per_model_part {parts}"]
    return [f"stages of {' '.join(map(str, _inner(counts)))} layers, the embedding before them, the head after them"]
