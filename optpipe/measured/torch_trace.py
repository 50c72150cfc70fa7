"""Chrome traces of `torch.profiler`, a process a rank, in which PyTorch's pipelining ran. `torch_ranges` finds the ops
of one process in them; here the processes of all files become one recording.

torch's runtime opens a range such as `PP:0F3` for every action (`torch.distributed.pipelining.schedules.
_PipelineScheduleRuntime`), `ScheduleGPipe` opens `Forward 3` and `Backward 3`, and `Schedule1F1B` none.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from optpipe.errors import InputError
from optpipe.measured.events import Events
from optpipe.measured.messages import impossible
from optpipe.measured.recording import MeasuredOp, Recording
from optpipe.measured.steps import BACKWARDS, divided_by_step, match_steps, number_steps
from optpipe.measured.torch_ranges import DEVICE, HOST, Ranges, RanOp, find_ranges
from optpipe.model.ops import Kind

NO_RANGE = (
    "{}: no range such as PP:0F3: a step by one of PyTorch's pipeline schedules is expected, profiled with "
    "ProfilerActivity.CPU, and CUDA on a GPU; Schedule1F1B opens no ranges: call optpipe_runtime.name_ranges(stage) "
    "before the profile"
)
CATEGORIES = (DEVICE, HOST, "cpu_op")  # of the events that are used
FIELDS = ("ph", "cat", "name", "pid", "tid", "ts", "dur")
_PIPELINE_GROUP = re.compile(r"(?:^|[^a-z])pp(?:$|[^a-z])")


class Process(NamedTuple):
    """What one process ran."""

    name: str  # its file, and its number where the file has several
    rank: int
    ranges: Ranges
    content: dict[str, Any]  # of its file


def read(files: Sequence[tuple[str, Iterable[str]]]) -> Recording:
    """All ops of these ranks, whose files have a name and a text in pieces. The device of a rank is its place
    among them.

    Raises InputError that names the file, and what is wrong with it.
    """
    processes = [process for n, (path, text) in enumerate(files) for process in _processes(_load(text, path), n, path)]
    processes.sort(key=lambda process: (process.rank, process.ranges.ops[0].op.stage))
    unnamed = [process.name for process in processes if process.ranges.stage_unnamed]
    if unnamed and len(unnamed) < len(processes):
        raise InputError(f"{unnamed[0]}: its ranges name no stage, those of other files do")
    ranks = [_measured_ops(process, device) for device, process in enumerate(processes)]
    _require_one_pipeline(ranks, processes)
    _require_all_ranks(ranks, processes)
    ops = [each for rank in match_steps(ranks, [process.name for process in processes]) for each in rank]
    if unnamed and (reason := impossible(divided_by_step(ops).values())):
        raise InputError(f"the ranks do not follow each other as stages of one GPipe pipeline do: {reason}")
    told = dict.fromkeys(sentence for process in processes for sentence in process.ranges.unused)
    return Recording(ops, (*told, *_other_ranks(processes)), any(process.ranges.on_host for process in processes))


def is_torchs(event: Mapping[str, Any]) -> bool:
    """Whether torch.profiler has written an event."""
    return event.get("cat") in CATEGORIES


def _load(pieces: Iterable[str], path: str) -> dict[str, Any]:
    """The fields of the trace, with the events that are used of it."""
    events = Events(pieces, path)
    used = [{field: event[field] for field in FIELDS if field in event} for event in events if _is_used(event)]
    if not events.listed:
        raise InputError(f"{path}: no trace of torch.profiler: JSON with traceEvents is expected")
    return {**events.rest, "traceEvents": used}


def _is_used(event: Mapping[str, Any]) -> bool:
    span = event.get("ph") == "X" and "dur" in event
    return span and (is_torchs(event) or str(event.get("name")).startswith("PP:"))


def _processes(content: dict[str, Any], place: int, path: str) -> Iterator[Process]:
    """Those of one file, which are several in traces that were put together."""
    try:
        by_process = find_ranges(content["traceEvents"], path)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{path}: not as torch.profiler writes it: {error}") from None
    if not by_process:
        raise InputError(NO_RANGE.format(path))
    for number, ranges in by_process.items():
        name = path if len(by_process) == 1 else f"{path} (process {number})"
        yield Process(name, _rank(content, place), ranges, content)


def _rank(content: dict[str, Any], place: int) -> int:
    """The rank that the trace names; without one, ranks are in the order of their files."""
    rank = _distributed(content).get("rank")
    return rank if isinstance(rank, int) else place


def _distributed(content: dict[str, Any]) -> dict[str, Any]:
    told = content.get("distributedInfo")
    return told if isinstance(told, dict) else {}


def _measured_ops(process: Process, device: int) -> list[MeasuredOp]:
    """The ops of a rank with their steps, without the backwards that do nothing in an evaluation on a CPU."""
    try:
        base = int(process.content.get("baseTimeNanoseconds", 0)) / 1e6
    except (TypeError, ValueError, OverflowError):
        base = 0.0
    ran = process.ranges.ops
    if process.ranges.stage_unnamed:
        ran = [each._replace(op=each.op._replace(stage=device)) for each in ran]
    steps: dict[int, list[RanOp]] = defaultdict(list)
    for each, step in zip(ran, number_steps([each.op for each in ran], process.name), strict=True):
        steps[step].append(each)
    return [
        MeasuredOp(each.op, device, step, each.ms, base + each.start_ms, process.rank)
        for step, in_step in steps.items()
        for each in in_step
        if each.op.kind is Kind.F or any(other.worked for other in in_step if other.op.kind in BACKWARDS)
    ]


def _require_one_pipeline(ranks: Sequence[Sequence[MeasuredOp]], processes: Sequence[Process]) -> None:
    where: dict[int, int] = {}
    for each in (each for rank in ranks for each in rank):
        if where.setdefault(each.op.stage, each.device) != each.device:
            one, other = (processes[device].name for device in (each.device, where[each.op.stage]))
            raise InputError(
                f"stage {each.op.stage} is in {one} and in {other}: the traces of one pipeline are expected"
            )


def _require_all_ranks(ranks: Sequence[Sequence[MeasuredOp]], processes: Sequence[Process]) -> None:
    """Raises InputError if a stage has a neighbour, or the group of the pipeline a rank, whose trace is not given."""
    given = {process.rank for process in processes}
    stages = {each.op.stage for rank in ranks for each in rank}
    for device, process in enumerate(processes):
        first = device if process.ranges.stage_unnamed else 0
        if missing := {first + s for s in process.ranges.neighbours} - stages:
            other = f"stage {min(missing)}" if min(missing) >= 0 else "a stage before it"
            raise InputError(
                f"the trace of a rank is missing: a stage in {process.name} exchanges messages with {other}; give the "
                "traces of all ranks of the pipeline"
            )
        if others := _pipeline_group(process) - given:
            raise InputError(
                f"the trace of rank {min(others)} is missing, which is in the pipeline of {process.name}: give the "
                "traces of all its ranks"
            )


def _pipeline_group(process: Process) -> set[int]:
    """The ranks of its pipeline, if the trace names a process group for that."""
    groups = _distributed(process.content).get("pg_config")
    for group in groups if isinstance(groups, list) else ():
        if not isinstance(group, dict) or not isinstance(group.get("ranks"), list):
            continue
        members = {rank for rank in group["ranks"] if isinstance(rank, int)}
        if process.rank in members and _PIPELINE_GROUP.search(str(group.get("pg_desc", "")).lower()):
            return members
    return set()


def _other_ranks(processes: Sequence[Process]) -> list[str]:
    """Ranks of the run whose traces are not given, where it is not known whether they are of this pipeline."""
    size = _distributed(processes[0].content).get("world_size")
    if not isinstance(size, int) or size <= len(processes):
        return []
    return [f"the other {size - len(processes)} of {size} ranks: their traces were not given; they may be replicas"]
