"""What every reader of measurements makes: a list of ops as they ran, and which stage a device's chunk is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from optpipe.errors import InputError
from optpipe.model.ops import Kind, Op
from optpipe.model.problem import MAX_DEVICES, MAX_FORWARDS, MAX_MICROBATCHES, MAX_STAGES

SHAPES = ("looped", "v")


class MeasuredOp(NamedTuple):
    """One op as it ran.

    Attributes
    ----------
    op
        Its kind (F, B, W or BW), stage and micro-batch.
    device
        The device of the pipeline that it ran on, from 0.
    step
        In which iteration.
    ms
        How long it took.
    start_ms
        When it began, by the clock of its rank; None where only its length was measured.
    rank
        The process that ran it, as its program numbers processes.
    replica
        The pipeline that it belongs to, where data parallel replicas were measured together.
    """

    op: Op
    device: int
    step: int
    ms: float
    start_ms: float | None = None
    rank: int = 0
    replica: int = 0

    @property
    def end_ms(self) -> float:
        """When it ended, by the clock of its rank; NaN where that was not measured."""
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
    """What a reader understood of some files.

    Attributes
    ----------
    ops
        All ops, of all steps, evaluations and steps that were cut off among them (`optpipe.measured.steps`).
    unused
        What stands in the files and was not used, and why, one sentence each.
    on_host
        Whether the times are those of the host, though ops run on a device.
    steps_differ
        Whether a problem is made of one step, with each micro-batch's own times, though none was asked for.
    spans_ms
        By step, how long its pipeline took, where that was measured apart from the ops.
    """

    ops: Sequence[MeasuredOp]
    unused: tuple[str, ...] = ()
    on_host: bool = False
    steps_differ: bool = False
    spans_ms: Mapping[int, float] = {}


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
    """Raises InputError if no problem can be as large, before anything is made of this size."""
    for count, what, most in (
        (stages, "stages", MAX_STAGES),
        (devices, "devices", MAX_DEVICES),
        (microbatches, "micro-batches", MAX_MICROBATCHES),
    ):
        if not 1 <= count <= most:
            raise InputError(f"{count} {what}: {f'at most {most} are supported' if count else 'at least 1 is needed'}")
    if stages * microbatches > MAX_FORWARDS:
        raise InputError(f"{stages} stages and {microbatches} micro-batches: at most {MAX_FORWARDS} forwards together")
