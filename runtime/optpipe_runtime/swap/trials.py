"""Steps that are undone if a rank runs out of memory: how what they have changed comes back, and which steps with a
schedule of their own are on trial, as the first step by a loaded schedule is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import gt

import torch
from torch import Tensor

from optpipe.errors import InputError, OptPipeError
from optpipe_runtime.execute.batch import Batch, BatchShapes
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.lowering.plan import Plan
from optpipe_runtime.ranks.cpu_group import CpuGroup
from optpipe_runtime.stage.state import save_random

log = logging.getLogger("optpipe.runtime")


def snapshot(rank: Rank, batch: Batch) -> Callable[[], None]:
    """Saves what a step changes on this rank: gradients, what else forwards change in modules, a batch that stages
    change in place, and random numbers. Returns a function that restores it."""
    restores = [stage.replay.snapshot() for stage in rank.stages.values()]
    of_batch = [io for stage in rank.stages.values() for io in stage.io.values() if io.begins or io.ends]
    copies: list[tuple[Tensor, Tensor]] = []
    if any(io.changes_inputs for io in of_batch):
        copies = [(tensor, tensor.clone()) for tensor in batch.tensors()]
    restore_random = save_random(rank.device)

    def restore() -> None:
        for restore_stage in restores:
            restore_stage()
        for tensor, copy in copies:
            tensor.data.copy_(copy)
        restore_random()

    return restore


def ran_out(error: BaseException) -> bool:
    """Whether the device, the host or the host pool had too little memory, and nothing else is wrong."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or type(error) is OptPipeError


@dataclass
class PlannedStep:
    """A step that all ranks have prepared."""

    plan: Plan
    shapes: Sequence[BatchShapes | InputError]  # of its micro-batches, by rank
    one_at_a_time: Callable[[], Plan | None]  # makes the plan if memory runs out; None if this rank cannot run it


class PlannedTrials:
    """A planned step is on trial if it may hold more bytes than all before it. The same on every rank."""

    def __init__(self, cpu_group: CpuGroup) -> None:
        self._cpu_group = cpu_group
        self._most_bytes: list[int] = []  # certified for each device, of all planned steps that have run

    def is_due(self, plan: Plan) -> bool:
        return not self._most_bytes or any(map(gt, _certified(plan), self._most_bytes))

    def end_step(self, plan: Plan) -> None:
        peaks = _certified(plan)
        self._most_bytes = list(map(max, peaks, self._most_bytes or peaks))

    def give_up(self, step: PlannedStep, complaint: str) -> None:
        """Collective, after a step on trial that some rank could not finish: it is to run one micro-batch at a time.
        Raises `OptPipeError` if it did that already."""
        why = next(text for text in self._cpu_group.gather(complaint) if text)
        plan = step.one_at_a_time()
        if plan is not None and plan.digest == step.plan.digest:
            plan = None
        if not self._cpu_group.all_equal(None if plan is None else plan.number):
            raise OptPipeError(
                f"{why}; the step is undone: leave it out or cut its largest micro-batch, and give a smaller "
                "activation_budget_bytes"
            )
        assert plan is not None
        if self._cpu_group.rank == 0:
            log.warning(
                "%s; the step runs again, one micro-batch at a time: give a smaller activation_budget_bytes", why
            )
        step.plan = plan


def _certified(plan: Plan) -> list[int]:
    """The most bytes that each device may hold."""
    return [peak.bytes for peak in plan.certificate.device]
