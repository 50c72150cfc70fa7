"""What every reader of measurements gets and makes: files of a form become ops as they ran, each on its stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from optpipe.errors import InputError
from optpipe.measured.events import Events, read_pieces
from optpipe.model.ops import Kind, Op
from optpipe.model.problem import MAX_DEVICES, MAX_FORWARDS, MAX_MICROBATCHES, MAX_STAGES

BEGINNING = 8  # pieces of a file by which a form is recognized: MB, of ASCII


class MeasuredOp(NamedTuple):
    """One op as it ran."""

    op: Op  # F, B, W or BW
    device: int  # of the pipeline, from 0
    step: int
    ms: float
    start_ms: float | None = None  # by the clock of its rank; None where only the length was measured
    rank: int = 0  # the process, as its program numbers processes
    replica: int = 0  # the pipeline, where data parallel replicas were measured together

    @property
    def end_ms(self) -> float:
        """By the clock of its rank; NaN where that was not measured."""
        return float("nan") if self.start_ms is None else self.start_ms + self.ms


class ChunkOp(NamedTuple):
    """An op of a rank's chunk, whose stage depends on how many ranks there are, and on how chunks lie."""

    kind: Kind
    rank: int  # of the pipeline
    chunk: int
    microbatch: int
    step: int
    start_ms: float
    ms: float
    replica: int = 0

    def on_stage(self, devices: int, shape: str) -> MeasuredOp:
        op = Op(self.kind, stage_of(self.rank, self.chunk, devices, shape), self.microbatch)
        return MeasuredOp(op, self.rank, self.step, self.ms, self.start_ms, self.rank, self.replica)


class Recording(NamedTuple):
    """What a reader understood of some files."""

    ops: Sequence[MeasuredOp]  # of all steps, evaluations and steps that were cut off among them
    unused: tuple[str, ...] = ()  # what stands in the files and was not used, and why, one sentence each
    on_host: bool = False  # whether the times are those of the host, though ops run on a device
    steps_differ: bool = False  # whether a problem has one step, with each micro-batch's own times, by default
    spans_ms: Mapping[int, float] = {}  # by step, how long its pipeline took, where that was measured apart from ops


class RunFacts(NamedTuple):
    """What a form may not say of the run that was measured.

    Attributes
    ----------
    microbatches
        Micro-batches a step, which megatron-timers do not say.
    devices
        Devices of the pipeline in megatron-timers. Default: all ranks.
    chunks
        Stages a device in megatron-timers.
    shape
        How chunks lie in primus, straggler and megatron-timers: looped or v. Default: as the times of primus show, else
        looped.
    """

    microbatches: int | None = None
    devices: int | None = None
    chunks: int = 1
    shape: str | None = None


class Sample:
    """A file, or a folder with the first trace in it, for a reader to recognize."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names = {each.name for each in path.iterdir()} if path.is_dir() else {path.name}
        self.file = traces_in(path)[0] if path.is_dir() else path

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The first events, if it is a Chrome trace."""
        events = list[dict[str, Any]]()
        with suppress(InputError):  # of another form, or cut where the beginning ends
            for event in Events(islice(read_pieces(self.file), BEGINNING), str(self.file)):
                events.append(event)
        return events


class Reader(Protocol):
    """Reads one form of measurements."""

    name: str  # of the form, as `problem_from` names it

    @property
    def takes(self) -> tuple[str, ...]:
        """The fields of `RunFacts` that its files lack."""

    def recognize(self, sample: Sample) -> bool:
        """Whether this file, or folder, is of the form."""

    def read(self, paths: Sequence[Path], facts: RunFacts) -> Recording:
        """All that ran by these files of one run. Raises InputError that names the file, and what is wrong with it."""


def traces_in(folder: Path) -> list[Path]:
    """The traces in a folder; if there is none, those in its folders, as `record_trace` leaves them. Raises InputError
    if there are none."""
    for inside in (folder.iterdir(), (file for each in folder.iterdir() if each.is_dir() for file in each.iterdir())):
        if traces := sorted(each for each in inside if each.is_file() and each.name.endswith((".json", ".json.gz"))):
            return traces
    raise InputError(f"{folder}: no traces in this folder: files named .json or .json.gz are expected")


def each_once(paths: Iterable[Path]) -> list[Path]:
    """The paths. Raises InputError if one is a folder or is there twice."""
    seen = dict[Path, Path]()
    for path in paths:
        if path.is_dir():
            raise InputError(f"{path}: is a folder, a file is expected")
        if path.resolve() in seen:
            raise InputError(f"{path}: is given twice: each file once is expected")
        seen[path.resolve()] = path
    return list(seen.values())


def joined(files: Iterable[tuple[str, Sequence[MeasuredOp]]]) -> list[MeasuredOp]:
    """The ops of the files of one run, each with its name.

    Raises InputError if files have the same op of a step and a replica.
    """
    ops = list[MeasuredOp]()
    where: dict[tuple[int, int, Op], tuple[int, str]] = {}
    for n, (path, of_file) in enumerate(files):
        if not of_file:
            raise InputError(f"{path}: no op was measured")
        for each in of_file:
            first, name = where.setdefault((each.replica, each.step, each.op), (n, path))
            if first != n:
                raise InputError(
                    f"{each.op} of step {each.step} and replica {each.replica} is in {name} and in {path}: files of "
                    "one run, each with other steps, replicas or stages, are expected"
                )
            ops.append(each)
    return ops


def stage_of(device: int, chunk: int, devices: int, shape: str) -> int:
    """The stage that a device's chunk is: looped or V-shaped placement."""
    return chunk * devices + (devices - 1 - device if shape == "v" and chunk % 2 else device)


def require_sizes(stages: int, devices: int, microbatches: int) -> None:
    """Raises InputError if no problem can be as large, before anything of this size is allocated."""
    for count, what, most in (
        (stages, "stages", MAX_STAGES),
        (devices, "devices", MAX_DEVICES),
        (microbatches, "micro-batches", MAX_MICROBATCHES),
    ):
        if not 1 <= count <= most:
            raise InputError(f"{count} {what}: {f'at most {most} are supported' if count else 'at least 1 is needed'}")
    if stages * microbatches > MAX_FORWARDS:
        raise InputError(f"{stages} stages and {microbatches} micro-batches: at most {MAX_FORWARDS} forwards together")
