"""Compares what a pipeline does with what `simulate` and `certify` predicted, for schedules of many kinds.

It uses two models: stages whose ops and copies take a given time and no processor (`paced`), so that there may be more
ranks than cores; and a GPT, which is really trained.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
from cyclopts import Parameter
from cyclopts.validators import Number

from examples import gpt, paced, reference
from examples.ranks import on_ranks
from examples.text import batch, corpus
from optpipe.anytime import solve
from optpipe.comparison import Comparison, compare
from optpipe.model.placement import Placement, Shape
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe.text import bytes_text
from optpipe_cli.options import Json
from optpipe_cli.output import print_figures, print_json
from optpipe_runtime.execute.report import StepReport
from optpipe_runtime.pipeline import Pipeline
from optpipe_runtime.stage.trial import Spread
from optpipe_solver import methods
from optpipe_solver.systems import SYSTEMS

log = logging.getLogger("optpipe.bench")

WARM_UP = 2  # steps
COLUMNS = ("schedule", "stages", "predicted", "measured", "off by", "peak predicted", "measured", "losses off by")
RECOMPUTED = "interleaved-recompute"


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


@dataclass(frozen=True)
class Task:
    """What one start of ranks does. `paced_ms` are the times of paced stages; None: the GPT, whose losses are compared,
    too."""

    cases: list[Case]
    microbatches: int
    steps: int
    paced_ms: paced.Times | None = None
    solve_s: float = 10.0  # for the methods that search
    size: gpt.Size = field(default_factory=gpt.Size)


@dataclass(frozen=True)
class MeasuredCase:
    """A case as predicted and as measured: ms of a step over all ranks, bytes by rank."""

    case: Case
    schedule: Schedule = field(repr=False)
    steps_ms: list[float]
    predicted_peak: list[int]
    measured_peak: list[int]
    losses: list[float]

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
        return self.measured_ms / self.schedule.makespan_ms - 1

    def cells(self, plain: Sequence[float] | None) -> list[str]:
        """As texts, for `COLUMNS`; `plain` are the losses of the same steps in one plain process."""
        return [
            self.schedule.method,
            self.case.stages,
            f"{self.schedule.makespan_ms:.1f}",
            f"{self.measured_ms:.1f} ± {self.spread_ms:.1f}",
            f"{self.deviation:+.1%}",
            bytes_text(max(self.predicted_peak)),
            bytes_text(max(self.measured_peak)),
            "" if plain is None else f"{reference.difference(self.losses, plain):.1e}",
        ]

    def figures(self, plain: Sequence[float] | None) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self.case),
            "found_by": self.schedule.method,
            "predicted_ms": self.schedule.makespan_ms,
            "measured_ms": self.measured_ms,
            "spread_ms": self.spread_ms,
            "deviation": self.deviation,
            "predicted_peak": self.predicted_peak,
            "measured_peak": self.measured_peak,
            "loss_difference": plain and reference.difference(self.losses, plain),
        }


def fidelity(*, steps: Annotated[int, Parameter(validator=Number(gte=2))] = 12, json: Json = False) -> None:
    """Compare steps and memory of many schedules with their predictions: of stages that sleep on four ranks, of a GPT
    on two, and of stages that sleep on five with little memory, where the solver's is also compared with published
    ones.

    Parameters
    ----------
    steps
        Steps of each schedule that count.
    """
    task = computing(steps)
    runs = {
        "stages that sleep, 4 ranks": (4, [sleeping(steps)]),
        "a GPT, 2 ranks": (2, [task]),
        "stages that sleep, 5 ranks": (5, with_little_memory(steps)),
    }
    found: dict[str, Any] = {}
    for title, (ranks, tasks) in runs.items():
        cases = [case for each in tasks for case in on_ranks(ranks, run, each)]
        plain = None
        if task in tasks:
            torch.set_num_threads(1)  # as ranks have
            plain = reference.losses(task.size, ranks, task.microbatches, WARM_UP + task.steps)
        found[title] = [case.figures(plain) for case in cases]
        if not json:
            heading = f"{title}; ms a step: median ± interquartile range"
            print_figures(heading, COLUMNS, [case.cells(plain) for case in cases], 2)
    if json:
        print_json(found)
    else:
        print(gain(cases))


def sleeping(steps: int) -> Task:
    """Ten schedules of all placements; half of them offload."""
    cases = [
        Case("1f1b"),
        Case("zb-h1"),
        Case("adaoffload", memory=2.5),
        Case("naive", memory=2.0),
        Case("interleaved", 2),
        Case("po-h", 2, memory=2.5),
        Case("po-f", 2, memory=2.5),
        Case("zb-v", 2, "v"),
        Case("v-min", 2, "v"),
        Case("lns", 2, "v", memory=1.5),
    ]
    return Task(cases, 8, steps, paced.Times(20.0, 20.0, 16.0, 12.0))


def computing(steps: int) -> Task:
    """1F1B and zero bubble with memory for all; PipeOffload and the solver with less than interleaved 1F1B needs; the
    solver with less than 1F1B needs where nothing leaves, without and with cheap recomputation."""
    cases = [
        Case("1f1b"),
        Case("zb-h1"),
        Case("po-f", 2, memory=1.8),
        Case("auto", 2, memory=1.8),
        Case("auto", memory=1.7, offloads=False),
        Case("auto", memory=1.7, recompute=("cheap", "full"), offloads=False),
    ]
    return Task(cases, 4, steps)


def with_little_memory(steps: int) -> tuple[Task, Task]:
    """Memory for 1.6 of the 5 activations that 1F1B needs, and a link slower than the compute: the same work as one
    stage a rank, for 1F1B that recomputes, and as two, for the best published schedule that fits and for the solver."""
    whole, half = paced.Times(40.0, 40.0, 24.0, 58.0, saved=16), paced.Times(20.0, 20.0, 12.0, 29.0, saved=8)
    two = [Case(RECOMPUTED, 2, memory=1.6), Case("auto", 2, memory=1.6)]
    return Task([Case("1f1b-recompute", memory=1.6)], 8, steps, whole), Task(two, 8, steps, half, solve_s=15.0)


def gain(rows: Sequence[MeasuredCase]) -> str:
    """How much less time the solver's schedule takes, which is the last, than the best of the published ones."""
    if len(rows) < 3:
        return "not every schedule was found in its time, so nothing is compared"
    *theirs, ours = rows
    best = min(theirs, key=lambda row: row.schedule.makespan_ms)
    fit = [row for row in published(ours.schedule.problem).rows if row.fits]
    predicted = 1 - ours.schedule.makespan_ms / best.schedule.makespan_ms
    sure = "a gain" if max(ours.steps_ms) < min(best.steps_ms) else "steps overlap: no gain beyond chance"
    return (
        f"the shortest published schedule that fits, by prediction: {fit[0].method}\n"
        f"a step takes {1 - ours.measured_ms / best.measured_ms:.1%} less than by {best.schedule.method}, predicted "
        f"{predicted:.1%}: {sure}"
    )


def published(problem: Problem) -> Comparison:
    """Compares all published schedules, each on the stages that it is for."""
    return compare(problem, [*(name for name in SYSTEMS if name not in methods.OWN), RECOMPUTED])


def run(task: Task) -> list[MeasuredCase]:
    """Collective: runs every case that a schedule is found for, each in a pipeline of its own."""
    rows = [_measured(case, *_pipeline(task, case), task) for case in task.cases]
    return [row for row in rows if row is not None]


Batches = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


def _pipeline(task: Task, case: Case) -> tuple[Pipeline, torch.optim.Optimizer | None, Batches]:
    """A pipeline of new stages, its optimizer, and its data by step."""
    rank = dist.get_rank()
    placement = Placement(chunks=case.chunks, shape=case.shape).along(range(dist.get_world_size()))
    if task.paced_ms:
        sleepers = {s: paced.SleepingStage(task.paced_ms) for s, owner in enumerate(placement) if owner == rank}
        pipe = Pipeline(sleepers, placement, paced.loss, task.microbatches)
        paced.slow_down_copies(pipe, task.paced_ms.copy)
        x = torch.zeros(task.microbatches * paced.SHAPE[0], *paced.SHAPE[1:])
        return pipe, None, lambda step: (x, x)
    stages = {s: stage for s, stage in enumerate(gpt.stages(task.size, len(placement))) if placement[s] == rank}
    text, size = corpus(), task.size
    pipe = Pipeline(
        stages,
        placement,
        gpt.loss,
        task.microbatches,
        host_memory_bytes=None if case.offloads else 0,
        recompute=case.recompute,
    )
    data = partial(batch, text, sequences=task.microbatches * size.sequences, context=size.context)
    return pipe, gpt.optimizer(stages.values()), data


def _measured(
    case: Case, pipe: Pipeline, optimizer: torch.optim.Optimizer | None, data: Batches, task: Task
) -> MeasuredCase | None:
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
    return MeasuredCase(
        case,
        plan.schedule,
        steps_ms=[max(report.step_ms for report in ranks) for ranks in steps[WARM_UP:]],
        predicted_peak=[peak.bytes for peak in plan.certificate.device],
        measured_peak=[max(report.peak_activation_bytes or 0 for report in reports) for reports in by_rank],
        losses=[next(report.loss for report in ranks if report.loss is not None) for ranks in steps],
    )
