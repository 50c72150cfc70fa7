"""Scalars for TensorBoard of a training that follows a service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime.lowering.plan import Plan


class Writer(Protocol):
    """Takes scalars, as the SummaryWriter of torch.utils.tensorboard does."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> object: ...


class SeenStep(NamedTuple):
    """What a rank remembers of a step."""

    losses: list[float]
    step_ms: float
    peak_bytes: int | None
    version: int


def write_scalars(
    writer: Writer, by_rank: Sequence[Sequence[SeenStep]], first: int, problem: Problem | None, plan: Plan | None
) -> None:
    """Of the steps from number `first` on, by rank; and what the plan that runs now promises, by the problem's
    costs."""
    for k, ranks in enumerate(zip(*by_rank, strict=True), first):
        losses = [loss for step in ranks for loss in step.losses]
        writer.add_scalar("optpipe/loss", sum(losses) / len(losses), k)
        writer.add_scalar("optpipe/step_ms", max(step.step_ms for step in ranks), k)
        writer.add_scalar("optpipe/schedule", ranks[0].version, k)
        for rank, step in enumerate(ranks):
            if step.peak_bytes is not None:
                writer.add_scalar(f"optpipe/rank{rank}/peak_bytes", step.peak_bytes, k)
    last = first + len(by_rank[0]) - 1
    if plan is not None and problem is not None:
        writer.add_scalar("optpipe/predicted_ms", _predicted_ms(problem, plan.schedule), last)
        for rank, peak in enumerate(plan.certificate.device):
            writer.add_scalar(f"optpipe/rank{rank}/certified_bytes", peak.bytes, last)


def _predicted_ms(problem: Problem, schedule: Schedule) -> float:
    """The time of a step by the costs as they are now."""
    if schedule.problem is problem:
        return schedule.makespan_ms
    return Schedule(problem, schedule.programs, schedule.links).makespan_ms
