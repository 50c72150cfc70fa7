"""Chrome traces of `torch.profiler`, a process a rank, in which PyTorch's pipelining ran. `torch_ranges` finds the ops
of one process in them, `torch_ranks` the pipelines; here the processes of all files become one recording.

torch's runtime opens a range such as `PP:0F3` for every action (`torch.distributed.pipelining.schedules.
_PipelineScheduleRuntime`); `Schedule1F1B` and `ScheduleGPipe` open none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from optpipe.errors import InputError
from optpipe.measured.events import Events, read_pieces
from optpipe.measured.readers.reader import RunFacts, Sample, each_once, traces_in
from optpipe.measured.readers.torch_ranges import DEVICE, HOST, RanOp, find_ranges
from optpipe.measured.readers.torch_ranks import Process, one_of_equals, parts_of_run, pipelines_of
from optpipe.measured.recording import MeasuredOp, Recording
from optpipe.measured.steps import BACKWARDS, match_steps, number_steps
from optpipe.model.ops import Kind

NO_RANGE = (
    "{}: no range such as PP:0F3: a step by one of PyTorch's pipeline schedules is expected, profiled with "
    "ProfilerActivity.CPU, and CUDA on a GPU; Schedule1F1B and ScheduleGPipe open no ranges: call "
    "optpipe_runtime.name_ranges(stage) before the profile"
)
CATEGORIES = (DEVICE, HOST, "cpu_op")  # of the events that are used
FIELDS = ("ph", "cat", "name", "pid", "tid", "ts", "dur")


class TorchTrace:
    """Reads the traces of all ranks. Each pipeline is a replica; the device of a rank is its place in its pipeline. Its
    `InputError` names the file, and what is wrong with it."""

    name = "torch-trace"

    def recognize(self, sample: Sample) -> bool:
        return any(event.get("cat") in CATEGORIES for event in sample.events)

    def read(self, paths: Sequence[Path], facts: RunFacts) -> Recording:
        files = each_once(file for path in paths for file in (traces_in(path) if path.is_dir() else [path]))
        processes = [process for n, file in enumerate(files) for process in _processes(_load(file), n, str(file))]
        processes.sort(key=lambda process: (process.rank, process.ranges.ops[0].op.stage))
        unused = dict.fromkeys(sentence for process in processes for sentence in process.ranges.unused)
        kept, left_out = one_of_equals(processes)
        ops = list[MeasuredOp]()
        for part in parts_of_run(kept):
            first = 1 + max((each.step for each in ops), default=-1)
            ops += [each._replace(step=first + each.step) for each in _ops_of_part(part)]
        on_host = any(process.ranges.on_host for process in processes)
        return Recording(ops, (*unused, *left_out, *_other_ranks(processes)), on_host)


def _ops_of_part(part: Sequence[Process]) -> list[MeasuredOp]:
    """The ops of all pipelines of a run, its steps numbered from 0."""
    ranks, names = list[list[MeasuredOp]](), list[str]()
    for replica, pipeline in enumerate(pipelines_of(part)):
        ranks += [_measured_ops(process, device, replica) for device, process in enumerate(pipeline)]
        names += [process.name for process in pipeline]
    return [each for rank in match_steps(ranks, names) for each in rank]


def _load(path: Path) -> dict[str, Any]:
    """The fields of the trace, with the events that are used of it."""
    events = Events(read_pieces(path), str(path))
    used = [{field: event[field] for field in FIELDS if field in event} for event in events if _is_used(event)]
    if not events.listed:
        raise InputError(f"{path}: no trace of torch.profiler: JSON with traceEvents is expected")
    return {**events.rest, "traceEvents": used}


def _is_used(event: Mapping[str, Any]) -> bool:
    span = event.get("ph") == "X" and "dur" in event
    return span and (event.get("cat") in CATEGORIES or str(event.get("name")).startswith("PP:"))


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
        process = Process(name, path, place, ranges, content)
        rank = process.distributed.get("rank")  # without one, ranks are in the order of their files
        yield process._replace(rank=rank) if isinstance(rank, int) else process


def _measured_ops(process: Process, device: int, replica: int) -> list[MeasuredOp]:
    """The ops of a rank with their steps, without the backwards that do nothing in an evaluation on a CPU."""
    ran = process.ranges.ops
    steps: dict[int, list[RanOp]] = defaultdict(list)
    for each, step in zip(ran, number_steps([each.op for each in ran], process.name), strict=True):
        steps[step].append(each)
    return [
        MeasuredOp(each.op, device, step, each.ms, process.base_ms + each.start_ms, process.rank, replica)
        for step, in_step in steps.items()
        for each in in_step
        if each.op.kind is Kind.F or any(other.worked for other in in_step if other.op.kind in BACKWARDS)
    ]


def _other_ranks(processes: Sequence[Process]) -> list[str]:
    """Ranks of the run whose traces are not given, where it is not known whether they are of this pipeline."""
    size = processes[0].distributed.get("world_size")
    if not isinstance(size, int) or size <= len(processes):
        return []
    return [f"the other {size - len(processes)} of {size} ranks: their traces were not given; they may be replicas"]
