"""Compares what a pipeline does with what `simulate` predicted, for schedules of many kinds.

It uses two models: stages whose ops and copies take a given time and no processor (`paced`), so that there may be more
ranks than cores; and the GPT of the demo, which is really trained. `optpipe_cli.fidelity` starts it by torchrun.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from optpipe.anytime import solve
from optpipe.model.placement import Placement, Shape
from optpipe_runtime.demo import gpt
from optpipe_runtime.demo.on_ranks import load, measure_on_ranks, schedule_file
from optpipe_runtime.demo.text import batch, corpus
from optpipe_runtime.execute.report import StepReport
from optpipe_runtime.fidelity import paced
from optpipe_runtime.pipeline import Pipeline
from optpipe_runtime.stage.timer import Spread

log = logging.getLogger("optpipe.bench")

WARM_UP = 2  # steps


@dataclass(frozen=True)
class Case:
    """A method of `optpipe.solve`, how many stages each rank gets and in which shape, the rank's memory in activations
    of all its stages (None: enough for all), the levels of recomputation that its stages offer, and whether activations
    may be offloaded."""

    method: str
    chunks: int = 1
    shape: Shape = "looped"
    memory: float | None = None
    recompute: tuple[str, ...] = ("full",)
    offloads: bool = True

    @property
    def stages(self) -> str:
        """What its stages are and can do, in words."""
        shape = [self.shape] if self.chunks > 1 else []
        recompute = [] if self.offloads else [f"recompute {' and '.join(self.recompute)}, no offload"]
        return ", ".join([f"{self.chunks} a rank", *shape, *recompute])

    def placement(self, ranks: int) -> list[int]:
        """The rank of each stage."""
        return Placement(chunks=self.chunks, shape=self.shape).along(range(ranks))


@dataclass(frozen=True)
class Task:
    """What one start by torchrun does. `paced_ms` are the times of paced stages; None: the GPT, whose losses are
    compared, too."""

    cases: list[Case]
    microbatches: int
    steps: int
    paced_ms: paced.Times | None = None
    solve_s: float = 10.0  # for the methods that search
    size: gpt.Size = field(default_factory=gpt.Size)


@dataclass(frozen=True)
class Row:
    """A case as predicted and as measured: ms of a step over all ranks, bytes by rank. `file` is the schedule's."""

    case: Case
    found_by: str
    predicted_ms: float
    steps_ms: list[float]
    predicted_peak: list[int]
    measured_peak: list[int]
    losses: list[float]
    file: dict[str, Any] = field(repr=False)

    @property
    def measured_ms(self) -> float:
        return median(self.steps_ms)

    @property
    def spread_ms(self) -> float:
        """The interquartile range."""
        return Spread.from_samples(self.steps_ms).iqr_ms

    @property
    def deviation(self) -> float:
        """The measured time relative to the predicted one, less 1."""
        return self.measured_ms / self.predicted_ms - 1


def run(task: Task) -> list[Row]:
    """Collective: runs every case that a schedule is found for, each in a pipeline of its own."""
    rows = [_measured(case, *_pipeline(task, case), task) for case in task.cases]
    return [row for row in rows if row is not None]


Batches = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


def _pipeline(task: Task, case: Case) -> tuple[Pipeline, torch.optim.Optimizer | None, Batches]:
    """A pipeline of new stages, its optimizer, and its data by step."""
    rank, placement = dist.get_rank(), case.placement(dist.get_world_size())
    if task.paced_ms:
        stages = {s: paced.Stage(task.paced_ms) for s, owner in enumerate(placement) if owner == rank}
        pipe = Pipeline(stages, placement, paced.loss, task.microbatches)
        paced.slow_down_copies(pipe, task.paced_ms.copy)
        x = torch.zeros(task.microbatches * paced.SHAPE[0], *paced.SHAPE[1:])
        return pipe, None, lambda step: (x, x)
    blocks = {s: stage for s, stage in enumerate(gpt.stages(task.size, len(placement))) if placement[s] == rank}
    optimizer = gpt.optimizer(blocks.values())
    text, size = corpus(), task.size
    pipe = Pipeline(
        blocks,
        placement,
        gpt.loss,
        task.microbatches,
        host_memory_bytes=None if case.offloads else 0,
        recompute=case.recompute,
    )
    return pipe, optimizer, lambda step: batch(text, step, task.microbatches * size.sequences, size.context)


def _measured(
    case: Case, pipe: Pipeline, optimizer: torch.optim.Optimizer | None, data: Batches, task: Task
) -> Row | None:
    """Collective. If the method finds no schedule in its time, returns None and logs why."""
    with pipe:
        profiled = pipe.profile(*data(0), activation_budget_bytes=2**50)
        pipe.problem = profiled if case.memory is None else profiled.with_memory_for(case.memory)
        result = solve(pipe.problem, method=case.method, time_limit_s=task.solve_s) if dist.get_rank() == 0 else None
        if not pipe.gather(result is not None and result.schedule is not None)[0]:
            if result:
                log.warning("%s is left out: %s", case.method, result.reason)
            return None
        pipe.load(result.schedule if result else None)
        reports = []
        for step in range(WARM_UP + task.steps):
            dist.barrier()  # a step that begins on all ranks at once takes the makespan
            reports.append(pipe.step(*data(step)))
            if optimizer:
                optimizer.step()
                optimizer.zero_grad()
        plan, by_rank = pipe.plan, pipe.gather(reports)
    assert plan is not None
    steps: list[tuple[StepReport, ...]] = list(zip(*by_rank, strict=True))
    return Row(
        case,
        plan.schedule.method,
        predicted_ms=plan.schedule.makespan_ms,
        steps_ms=[max(report.step_ms for report in ranks) for ranks in steps[WARM_UP:]],
        predicted_peak=[peak.bytes for peak in plan.certificate.device],
        measured_peak=[max(report.peak_activation_bytes or 0 for report in reports) for reports in by_rank],
        losses=[next(report.loss for report in ranks if report.loss is not None) for ranks in steps],
        file=schedule_file(plan.schedule),
    )


def main() -> None:
    """`python -m optpipe_runtime.fidelity.cases TASK ROWS`, under torchrun."""
    logging.basicConfig(level=logging.WARNING)
    task = load(Task, Path(sys.argv[1]))
    measure_on_ranks(lambda: run(task), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
