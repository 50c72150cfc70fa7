"""Chrome traces of `torch.profiler`, a process a rank, in which PyTorch's pipelining ran. `torch_ranges` finds the ops
of one process in them. Here it is found which ranks form a pipeline, which compute the same ops, and which files are of
later steps; the processes of all files become one recording.

torch's runtime opens a range such as `PP:0F3` for every action (`torch.distributed.pipelining.schedules.
_PipelineScheduleRuntime`); `Schedule1F1B` and `ScheduleGPipe` open none.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from optpipe.errors import InputError
from optpipe.measured.events import Events, read_pieces
from optpipe.measured.readers.torch_ranges import DEVICE, HOST, Ranges, RanOp, find_ranges
from optpipe.measured.recording import MeasuredOp, Recording, RunFacts, Sample, each_once, traces_in
from optpipe.measured.steps import BACKWARDS, listed, match_steps, number_steps
from optpipe.model.ops import Kind

NO_RANGE = (
    "{}: no range such as PP:0F3: a step by one of PyTorch's pipeline schedules is expected, profiled with "
    "ProfilerActivity.CPU, and CUDA on a GPU; Schedule1F1B and ScheduleGPipe open no ranges: call "
    "optpipe_runtime.name_ranges(stage) before the profile"
)
CATEGORIES = (DEVICE, HOST, "cpu_op")  # of the events that are used
FIELDS = ("cat", "name", "pid", "tid", "ts", "dur")
_PIPELINE = re.compile(r".*(?<![a-z])pp(?![a-z]).*")  # such as mesh_pp, as DeviceMesh names it
_SAME_OPS = re.compile(r"(mesh_)?(tp|cp)")  # tensor and context parallel ranks


class Process(NamedTuple):
    """What one process ran."""

    name: str  # its file, and its number where the file has several
    file: str
    rank: int
    ranges: Ranges
    distributed: dict[str, Any]  # facts of the run in its file
    base_ms: float  # the moment from which the times of its ops count

    @property
    def folder(self) -> str:
        return self.file.replace("\\", "/").rpartition("/")[0]

    @property
    def span_ms(self) -> tuple[float, float]:
        """From its first start to its last end."""
        ops = self.ranges.ops
        return self.base_ms + ops[0].start_ms, self.base_ms + max(each.start_ms + each.ms for each in ops)

    def group(self, names: re.Pattern[str]) -> frozenset[int]:
        """The ranks of the first process group with such a name that it is in; none if no group has one."""
        groups = self.distributed.get("pg_config")
        for group in groups if isinstance(groups, list) else ():
            if isinstance(group, dict) and isinstance(group.get("ranks"), list):
                members = frozenset(rank for rank in group["ranks"] if isinstance(rank, int))
                if self.rank in members and names.fullmatch(str(group.get("pg_desc", "")).lower()):
                    return members
        return frozenset()


class TorchTrace:
    """Reads the traces of all ranks. Each pipeline is a replica; the device of a rank is its place in its pipeline. Its
    `InputError` names the file, and what is wrong with it."""

    name = "torch-trace"
    takes = ()

    def recognize(self, sample: Sample) -> bool:
        return any(event.get("cat") in CATEGORIES for event in sample.events)

    def read(self, paths: Sequence[Path], facts: RunFacts) -> Recording:
        files = each_once(file for path in paths for file in (traces_in(path) if path.is_dir() else [path]))
        processes = [process for n, file in enumerate(files) for process in _processes(file, n)]
        processes.sort(key=lambda process: (process.rank, process.ranges.ops[0].op.stage))
        unused = dict.fromkeys(sentence for process in processes for sentence in process.ranges.unused)
        kept, left_out = _one_of_equals(processes)
        ops = list[MeasuredOp]()
        for part in _parts_of_run(kept):
            first = 1 + max((each.step for each in ops), default=-1)
            ranks, names = list[list[MeasuredOp]](), list[str]()
            for replica, pipeline in enumerate(_pipelines_of(part)):
                ranks += [_measured_ops(process, device, replica) for device, process in enumerate(pipeline)]
                names += [process.name for process in pipeline]
            ops += [each._replace(step=first + each.step) for rank in match_steps(ranks, names) for each in rank]
        size = processes[0].distributed.get("world_size")
        if isinstance(size, int) and size > len(processes):
            others = size - len(processes)
            left_out.append(f"the other {others} of {size} ranks: their traces were not given; they may be replicas")
        on_host = any(process.ranges.on_host for process in processes)
        return Recording(ops, (*unused, *left_out), on_host)


def _processes(path: Path, place: int) -> Iterator[Process]:
    """Those of one file, which are several in traces that were put together."""
    events = Events(read_pieces(path), str(path))
    spans = [
        {field: event[field] for field in FIELDS if field in event}
        for event in events
        if event.get("ph") == "X" and "dur" in event
        if event.get("cat") in CATEGORIES or str(event.get("name")).startswith("PP:")
    ]
    if not events.listed:
        raise InputError(f"{path}: no trace of torch.profiler: JSON with traceEvents is expected")
    try:
        by_process = find_ranges(spans, str(path))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{path}: not as torch.profiler writes it: {error}") from None
    if not by_process:
        raise InputError(NO_RANGE.format(path))
    try:
        base_ms = int(events.rest.get("baseTimeNanoseconds", 0)) / 1e6
    except (TypeError, ValueError, OverflowError):
        base_ms = 0.0
    info = events.rest.get("distributedInfo")
    distributed = info if isinstance(info, dict) else {}
    rank = distributed.get("rank")  # without one, ranks are in the order of their files
    for number, ranges in by_process.items():
        name = str(path) if len(by_process) == 1 else f"{path} (process {number})"
        yield Process(name, str(path), rank if isinstance(rank, int) else place, ranges, distributed, base_ms)


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


def _one_of_equals(processes: Sequence[Process]) -> tuple[list[Process], list[str]]:
    """Of tensor and context parallel ranks, which compute the same ops, the first; and which were left out."""
    ranks = {process.rank for process in processes}
    first = [min(ranks & process.group(_SAME_OPS), default=process.rank) for process in processes]
    kept = [process for process, rank in zip(processes, first, strict=True) if process.rank == rank]
    if not (others := sorted(ranks - {process.rank for process in kept})):
        return kept, []
    return kept, [f"ranks {listed(others)}: tensor or context parallel ranks, which compute the same ops as others"]


def _parts_of_run(processes: Sequence[Process]) -> list[list[Process]]:
    """All of them where each rank has one file; otherwise those of each folder, one after the other in time.

    Raises InputError if a folder has a rank twice, or folders do not have the same ranks, at different times.
    """
    if not _repeated(processes, lambda process: process.rank):
        return [list(processes)]
    parts = list(_divided(processes, lambda process: process.folder).values())
    for part in parts:
        if twice := _repeated(part, lambda process: process.rank):
            raise InputError(
                f"rank {twice[0].rank} is in {twice[0].name} and in {twice[1].name}: one file a rank is expected; put "
                "the traces of other steps into a folder of their own"
            )
    ranks = [{process.rank for process in part} for part in parts]
    for part, of_part in zip(parts, ranks, strict=True):
        if missing := set.union(*ranks) - of_part:
            raise InputError(
                f"{part[0].folder}: no trace of rank {min(missing)}, which other folders have: the same ranks are "
                "expected in each"
            )
    parts.sort(key=lambda part: part[0].span_ms)
    for before, after in pairwise(parts):
        ended = {process.rank: process for process in before}
        for process in after:
            if ended[process.rank].span_ms[1] > process.span_ms[0]:
                one = ended[process.rank].name
                raise InputError(f"{one} and {process.name} have rank {process.rank} at one time: give each trace once")
    return parts


def _pipelines_of(processes: Sequence[Process]) -> list[list[Process]]:
    """The ranks of each pipeline: by their process groups; without these all, or those of each folder, which are
    replicas if all traces have ranks: otherwise they may as well be of later steps.

    Raises InputError if a stage is twice in a pipeline, or the trace of one of its ranks is missing: of a neighbour, or
    of one in its group.
    """
    if all(process.group(_PIPELINE) for process in processes):
        pipelines = _divided(processes, lambda process: process.group(_PIPELINE))
    else:
        pipelines = _divided(processes, lambda process: process.folder)
        ranked = all(isinstance(process.distributed.get("rank"), int) for process in processes)
        if not (ranked and _stage_twice(processes)):
            pipelines = {"": list(processes)}
    for pipeline in pipelines.values():
        if twice := _stage_twice(pipeline):
            stage, first, second = twice
            raise InputError(
                f"stage {stage} is in {first} and in {second}, and nothing says that these are replicas: process "
                "groups named pp in distributedInfo, or ranks there and a folder for each pipeline, are expected"
            )
        ranks = {process.rank for process in pipeline}
        stages = {each.op.stage for process in pipeline for each in process.ranges.ops}
        for process in pipeline:
            if missing := process.ranges.neighbours - stages:
                raise InputError(
                    f"the trace of a rank is missing: a stage in {process.name} exchanges messages with stage "
                    f"{min(missing)}; give the traces of all ranks of the pipeline"
                )
            if others := process.group(_PIPELINE) - ranks:
                raise InputError(
                    f"the trace of rank {min(others)} is missing, which is in the pipeline of {process.name}: give the "
                    "traces of all its ranks"
                )
    return list(pipelines.values())


def _stage_twice(pipeline: Iterable[Process]) -> tuple[int, str, str] | None:
    """A stage, and two processes that both have it; None if there is none."""
    where: dict[int, Process] = {}
    for process in pipeline:
        for stage in {each.op.stage for each in process.ranges.ops}:
            if (other := where.setdefault(stage, process)) is not process:
                return stage, other.name, process.name
    return None


def _divided(processes: Iterable[Process], key: Callable[[Process], Hashable]) -> dict[Hashable, list[Process]]:
    divided: dict[Hashable, list[Process]] = defaultdict(list)
    for process in processes:
        divided[key(process)].append(process)
    return divided


def _repeated(processes: Iterable[Process], key: Callable[[Process], Hashable]) -> tuple[Process, Process] | None:
    """Two processes of different files with the same key."""
    first: dict[Hashable, Process] = {}
    for process in processes:
        if (other := first.setdefault(key(process), process)).file != process.file:
            return other, process
    return None
