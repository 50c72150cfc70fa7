"""Who is who among the ranks of torch traces: which form a pipeline, which compute the same ops, and which files are of
later steps."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from optpipe.errors import InputError
from optpipe.measured.readers.torch_ranges import Ranges
from optpipe.measured.steps import listed

_PIPELINE = re.compile(r".*(?<![a-z])pp(?![a-z]).*")  # such as mesh_pp, as DeviceMesh names it
_SAME_OPS = re.compile(r"(mesh_)?(tp|cp)")  # tensor and context parallel ranks


class Process(NamedTuple):
    """What one process ran."""

    name: str  # its file, and its number where the file has several
    file: str
    rank: int
    ranges: Ranges
    content: dict[str, Any]  # of its file

    @property
    def folder(self) -> str:
        return self.file.replace("\\", "/").rpartition("/")[0]

    @property
    def distributed(self) -> dict[str, Any]:
        """What the trace says of the run."""
        info = self.content.get("distributedInfo")
        return info if isinstance(info, dict) else {}

    @property
    def base_ms(self) -> float:
        """The moment from which the times of its ops count."""
        try:
            return int(self.content.get("baseTimeNanoseconds", 0)) / 1e6
        except (TypeError, ValueError, OverflowError):
            return 0.0

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


def one_of_equals(processes: Sequence[Process]) -> tuple[list[Process], tuple[str, ...]]:
    """Of tensor and context parallel ranks, which compute the same ops, the first; and which were left out."""
    ranks = {process.rank for process in processes}
    first = [min(ranks & process.group(_SAME_OPS), default=process.rank) for process in processes]
    kept = [process for process, rank in zip(processes, first, strict=True) if process.rank == rank]
    if not (others := sorted(ranks - {process.rank for process in kept})):
        return kept, ()
    return kept, (f"ranks {listed(others)}: tensor or context parallel ranks, which compute the same ops as others",)


def parts_of_run(processes: Sequence[Process]) -> list[list[Process]]:
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


def pipelines_of(processes: Sequence[Process]) -> list[list[Process]]:
    """The ranks of each pipeline: as their process groups say; without these all, or those of each folder, which are
    replicas if all traces say their ranks: otherwise they may as well be of later steps.

    Raises InputError if a stage is twice in a pipeline, or a rank of it is missing.
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
        _require_all_ranks(pipeline)
    return list(pipelines.values())


def _stage_twice(pipeline: Iterable[Process]) -> tuple[int, str, str] | None:
    """A stage, and two processes that both have it; None if there is none."""
    where: dict[int, Process] = {}
    for process in pipeline:
        for stage in {each.op.stage for each in process.ranges.ops}:
            if (other := where.setdefault(stage, process)) is not process:
                return stage, other.name, process.name
    return None


def _require_all_ranks(pipeline: Sequence[Process]) -> None:
    """Raises InputError if a stage has a neighbour, or the group of the pipeline a rank, whose trace is not given."""
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
