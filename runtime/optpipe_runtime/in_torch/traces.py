"""What makes traces of PyTorch's own pipelining: `record_trace` notes when its ops ran, without a profiler;
`name_ranges` gives a profile the ranges that it lacks.

Around every forward and backward of a stage the clock is read twice: the host's, or on a GPU two events on the compute
stream, which are read after the last step. Nothing waits within a step. Each rank writes one Chrome trace with the
ranges that `optpipe.measured.readers.torch_trace` reads, all by the clock of the pipeline's first rank."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.profiler import record_function

from optpipe.errors import InputError
from optpipe.measured.readers.torch_ranges import DEVICE, HOST
from optpipe_runtime.memory.engines import Clock
from optpipe_runtime.torch_private.groups import described_groups
from optpipe_runtime.torch_private.pipelining import (
    COMPUTE_LOSS,
    PipelineSchedule,
    StageBase,
    is_training,
    replaced,
    stages_of_schedule,
)


def record_trace(schedule: PipelineSchedule, folder: str | Path, after: int = 5, steps: int = 5) -> None:
    """Records when each forward, backward and loss of some training steps ran, and writes that as a trace.

    All ranks of the pipeline call it, once, before the steps. After the last recorded step each of them writes
    `folder/pipeline-N/rank-R.json.gz`, N the first rank of its pipeline, R its own, both of the whole run.
    `optpipe diagnose folder` reads them, each pipeline as a replica. Ranks compare their clocks before and after the
    recorded steps; within a step nothing waits. If the training ends before, there is no file. Raises `InputError` if
    the folder cannot be made, there is no step to record, or the schedule is being recorded already.

    Parameters
    ----------
    schedule
        One of torch.distributed.pipelining.
    folder
        Made if it is not there. Files of an earlier recording are overwritten.
    after
        How many training steps run before the first that is recorded: the first ones often take longer.
    steps
        How many are recorded. Evaluations do not count, and are not recorded.
    """
    if after < 0 or steps < 1:
        raise InputError(f"after = {after}, steps = {steps}: after at least 0 steps, at least 1 to record are expected")
    if "step" in vars(schedule):
        raise InputError("schedule: its step is replaced already, as by another record_trace: one at a time")
    group = stages_of_schedule(schedule)[0].group
    path = Path(folder) / f"pipeline-{dist.get_process_group_ranks(group)[0]}" / f"rank-{dist.get_rank()}.json.gz"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"folder = {folder}: cannot be made: {error.strerror}") from None
    vars(schedule)["step"] = Recorder(schedule, path, range(after, after + steps))


Mark = Callable[[], Any]  # of a clock


class RanOp(NamedTuple):
    """An op that ran, its kind by torch's letter, and the marks of the clock before and after it."""

    step: int
    stage: int
    letter: str
    microbatch: int
    begin: Any
    end: Any


class Meeting(NamedTuple):
    """When the ranks compared their clocks: a mark of this rank's, and the first rank's time of it."""

    mark: Any
    ms: float
    within_ms: float


ROUNDS = 20  # of comparing clocks


class Ahead(NamedTuple):
    """How far the clock of this rank is ahead of the first rank's: `ms`, off by at most `within_ms`."""

    ms: float
    within_ms: float


def now_ms() -> float:
    """The clock that is compared."""
    return time.perf_counter() * 1e3


def compare_clocks(group: dist.ProcessGroup | None, device: torch.device) -> Ahead:
    """All ranks of the group call this, between two steps: it waits for the others, and for the device.

    Nobody leaves a gathering before everybody has entered it. So a rank leaves it, by its own clock, no earlier than
    the first rank enters it, by that one's clock, plus what its clock is ahead; and the other way round. What the clock
    is ahead lies between the tightest bounds of some rounds.
    """
    entered, left, entered_first = list[float](), list[float](), list[float]()
    for _ in range(ROUNDS):
        entered.append(now_ms())
        entered_first.append(_gather([entered[-1]], group, device)[0])
        left.append(now_ms())
    left_first = _gather(left, group, device)
    most = min(mine - first for mine, first in zip(left, entered_first, strict=True))
    least = max(mine - first for mine, first in zip(entered, left_first, strict=True))
    return Ahead((most + least) / 2, (most - least) / 2)


def _gather(times: list[float], group: dist.ProcessGroup | None, device: torch.device) -> list[float]:
    """The first rank's times, after all ranks have sent theirs."""
    mine = torch.tensor(times, dtype=torch.float64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    first: list[float] = gathered[0].tolist()  # waits for the device, too
    return first


class Recorder:
    """Stands in the place of the schedule's `step` until the last recorded step has run."""

    def __init__(self, schedule: PipelineSchedule, path: Path, recorded: range) -> None:
        self._schedule, self._path, self._recorded = schedule, path, recorded
        self._run = schedule.step
        self._stages = stages_of_schedule(schedule)
        self._clock = Clock(self._stages[0].device)
        self._step = 0
        self._ops: list[RanOp] = []
        self._first: Meeting

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not is_training(self._schedule):
            return self._run(*args, **options)
        if self._step == self._recorded.start:
            self._first = self._meet()
        with ExitStack() as recording:
            if self._step in self._recorded:
                mark = self._clock.marker()
                for stage in self._stages:
                    names = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
                    timed = {name: self._timed(getattr(stage, name), stage.stage_index, name, mark) for name in names}
                    recording.enter_context(replaced(stage, timed))
                if any(stage.is_last for stage in self._stages):
                    with_loss = self._with_loss(getattr(self._schedule, COMPUTE_LOSS), mark)
                    recording.enter_context(replaced(self._schedule, {COMPUTE_LOSS: with_loss}))
            result = self._run(*args, **options)
        self._step += 1
        if self._step == self._recorded.stop:
            del vars(self._schedule)["step"]
            self._write(self._meet())
        return result

    def _timed(self, run: Callable[..., Any], stage: int, name: str, mark: Mark) -> Callable[..., Any]:
        add, step = self._ops.append, self._step
        letter = {"forward_one_chunk": "F", "backward_weight_one_chunk": "W"}.get(name, "B")

        def timed(microbatch: int, *args: Any, **options: Any) -> Any:
            begin = mark()
            result = run(microbatch, *args, **options)
            end = mark()
            input_only = letter == "B" and not options.get("full_backward", True)
            add(RanOp(step, stage, "I" if input_only else letter, microbatch, begin, end))
            return result

        return timed

    def _with_loss(self, compute_loss: Callable[..., None], mark: Mark) -> Callable[..., None]:
        """Where the stage is the last, the loss belongs to the forward, which ran right before it."""

        def timed(stage: StageBase, *args: Any, **options: Any) -> None:
            compute_loss(stage, *args, **options)
            if stage.is_last:
                self._ops[-1] = self._ops[-1]._replace(end=mark())

        return timed

    def _meet(self) -> Meeting:
        """Outside of a step: waits for all ranks, and for the device."""
        ahead = compare_clocks(self._stages[0].group, self._stages[0].device)
        self._clock.settle()
        before, mark, behind = now_ms(), self._clock.mark(), now_ms()
        return Meeting(mark, (before + behind) / 2 - ahead.ms, ahead.within_ms + (behind - before) / 2)

    def _write(self, last: Meeting) -> None:
        rank, pipeline = dist.get_rank(), dist.get_process_group_ranks(self._stages[0].group)
        content = {
            "distributedInfo": {
                "rank": rank,
                "world_size": dist.get_world_size(),
                "pg_config": [
                    {"pg_desc": name, "ranks": ranks} for name, ranks in [("pp", pipeline), *described_groups()]
                ],
            },
            "clocks_differ_by_at_most_ms": max(self._first.within_ms, last.within_ms),
            "traceEvents": [event for op in self._events(last) for event in op],
        }
        with gzip.open(self._path, "wt", encoding="utf-8") as file:
            json.dump(content, file)

    def _events(self, last: Meeting) -> Iterator[list[dict[str, Any]]]:
        """Each op as a range, in us. What two clocks drift apart between the meetings counts from step to step, so that
        within a step times are those of one clock."""
        first, elapsed_ms = self._first, self._clock.ms
        drift = (last.ms - first.ms) / elapsed_ms(first.mark, last.mark) - 1
        on_host = self._stages[0].device.type != "cuda"
        step, shift = -1, 0.0
        for op in self._ops:
            begin = elapsed_ms(first.mark, op.begin)
            if op.step != step:
                step, shift = op.step, first.ms + drift * begin
            span = {"ph": "X", "pid": dist.get_rank(), "tid": 0, "ts": round((shift + begin) * 1e3, 3)}
            span["dur"] = round(elapsed_ms(op.begin, op.end) * 1e3, 3)
            name = f"PP:{op.stage}{op.letter}{op.microbatch}"
            events = [{**span, "cat": HOST if on_host else DEVICE, "name": name, "args": {"step": op.step}}]
            if on_host:  # an op's own work: the range has no waiting for messages before it
                events.append({**span, "cat": "cpu_op", "name": name})
            yield events


def name_ranges(*stages: PipelineStage) -> None:
    """Opens a range such as `PP:0F3` around every forward and backward of these stages of this rank, as torch's runtime
    does. `Schedule1F1B` and `ScheduleGPipe` open none: with these `optpipe problem from torch-trace` reads their
    traces, too. Call it before the steps that are profiled."""

    def run_in_range(run: Callable[..., Any], name: str, microbatch: int, *args: Any, **options: Any) -> Any:
        with record_function(f"{name}{microbatch}"):
            return run(microbatch, *args, **options)

    for stage in stages:
        for method, letter in (("forward_one_chunk", "F"), ("backward_one_chunk", "B")):
            if method not in vars(stage):  # not named before
                name = f"PP:{stage.stage_index}{letter}"
                setattr(stage, method, partial(run_in_range, getattr(stage, method), name))
