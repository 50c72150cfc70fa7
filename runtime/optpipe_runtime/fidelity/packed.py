"""What a schedule for every step gains on packed documents, for `optpipe demo --packed`.

One pipeline runs each step in four ways, in turns. The ways with a fixed schedule are planned steps, too, whose orders
are given, so that all have the same work beside them. The stages are those of the GPT, which is really trained, or
sleep (`paced`). `optpipe_cli.demo_packed` starts it by torchrun.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

from optpipe.anytime import solve
from optpipe.errors import OptPipeError
from optpipe.model.figures import of_microbatch
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime.demo import gpt
from optpipe_runtime.demo.on_ranks import load, measure_on_ranks, schedule_file
from optpipe_runtime.demo.text import Microbatch, corpus, documents, packed
from optpipe_runtime.execute.batch import Microbatches
from optpipe_runtime.fidelity import paced
from optpipe_runtime.pipeline import Pipeline
from optpipe_runtime.steps.ahead import StepAnnouncement, Unmeasured
from optpipe_runtime.steps.planned import PlannedSteps

ONE_F_ONE_B, FIXED, SORTED, PLANNED = WAYS = ("1f1b", "fixed", "fixed, shortest first", "one for every step")
WARM_UP = len(WAYS)  # steps, with a schedule for each


@dataclass(frozen=True)
class Task:
    """What one start by torchrun does.

    Attributes
    ----------
    microbatches, documents
        Of a step, and of a micro-batch.
    rounds
        How many batches are trained on, in each of the ways.
    paced_ms
        Times of paced stages; None: the GPT.
    solve_s
        Of the search for the fixed schedule.
    """

    microbatches: int
    documents: int
    rounds: int
    paced_ms: paced.Times | None = None
    solve_s: float = 10.0
    size: gpt.Size = field(default_factory=gpt.Size)

    @property
    def longest(self) -> int:
        """Tokens of the largest micro-batch that can be."""
        return self.documents * self.size.context

    def steps(self) -> list[list[Microbatch]]:
        """All that run, in order: a warm-up, in which there is a largest micro-batch, then each batch once in each way,
        sorted where the way asks for it."""
        cut = documents(corpus(), self.size.context)
        batches = [packed(cut, number, self.microbatches, self.documents) for number in range(WARM_UP + self.rounds)]
        batches[0][:1] = packed([each for each in cut if len(each) > self.size.context], 0, 1, self.documents)
        by_length = [sorted(batch, key=lambda each: each.inputs.numel()) for batch in batches]
        return batches[:WARM_UP] + [
            (by_length if way == SORTED else batches)[number]
            for number in range(WARM_UP, WARM_UP + self.rounds)
            for way in WAYS
        ]


@dataclass(frozen=True)
class Way:
    """The steps of one way, as predicted and as measured: ms over all ranks. `file` is the schedule of the last one."""

    name: str
    predicted_ms: list[float]
    measured_ms: list[float]
    file: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Result:
    """All ways; the loss of every step of `Task.steps`; and whether each held no more bytes than certified, where they
    were counted."""

    ways: list[Way]
    losses: list[float]
    within_memory: bool


def features(inputs: torch.Tensor, lengths: torch.Tensor) -> dict[str, float]:
    """Of one micro-batch: its tokens, and what attention within documents follows from."""
    return {"tokens": float(lengths.sum()), "squares": float(lengths.square().sum())}


class StepsInTurns(PlannedSteps):
    """Plans every step, but runs it in the way whose turn it is."""

    def __init__(self, pipe: Pipeline, budget: int, solve_s: float) -> None:
        super().__init__(pipe, features, activation_budget_bytes=budget)
        self._solve_s, self._warm_up = solve_s, list[Problem]()

    def _plan(self, by_rank: Sequence[StepAnnouncement], begins: threading.Event) -> Schedule | Unmeasured:
        planned, number = super()._plan(by_rank, begins), by_rank[0].number
        if isinstance(planned, Unmeasured):
            return planned
        if number < WARM_UP:
            self._warm_up.append(planned.problem)
        way = WAYS[number % len(WAYS)]
        if number < WARM_UP or way == PLANNED:
            return planned
        fixed = self._fixed[way]
        return Schedule(planned.problem, fixed.programs, fixed.links, fixed.method)

    @cached_property
    def _fixed(self) -> dict[str, Schedule]:
        """The best for micro-batches that all take the mean time and hold what the largest holds, and 1F1B."""
        problem = equal_microbatches(self._warm_up)
        methods = {ONE_F_ONE_B: "1f1b", FIXED: "auto"}
        schedules = {
            way: solve(problem, method=name, time_limit_s=self._solve_s).schedule for way, name in methods.items()
        }
        schedules[SORTED] = schedules[FIXED]
        if None in schedules.values():
            raise OptPipeError("no fixed schedule was found in its time")
        return {way: schedule for way, schedule in schedules.items() if schedule is not None}


def equal_microbatches(steps: Sequence[Problem]) -> Problem:
    """A step whose micro-batches all take the mean time of those of these steps, and as many bytes as the largest."""
    stages = []
    for same_stage in zip(*(step.stages for step in steps), strict=True):
        lists = [dict(stage.lists()) for stage in same_stage]
        together = {name: list(chain.from_iterable(figures[name] for figures in lists)) for name in lists[0]}
        figures = {name: (max if name.endswith("_bytes") else mean)(values) for name, values in together.items()}
        stages.append(same_stage[0].model_copy(update=figures))
    return steps[0].replace(stages=stages, p2p_ms=mean(of_microbatch(step.p2p_ms, 0) for step in steps))


def run(task: Task) -> Result:
    """Collective: runs all steps."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if task.paced_ms:
        module: torch.nn.Module = paced.Stage(task.paced_ms)
        budget = ranks * (task.paced_ms.saved + 2) * task.longest * paced.PACKED_WIDTH * 4
    else:
        module, budget = gpt.stages(task.size, ranks)[rank], 2**30
    loss_fn = paced.loss if task.paced_ms else gpt.loss
    optimizer = gpt.optimizer([module])
    steps, seen, files = task.steps(), [], {}
    with (
        Pipeline({rank: module}, range(ranks), loss_fn, task.microbatches) as pipe,
        StepsInTurns(pipe, budget, task.solve_s) as train,
    ):
        batches = train.ahead(given(step, bool(task.paced_ms)) for step in steps)
        for number, (inputs, targets, kwargs) in enumerate(batches):
            dist.barrier()  # a step that begins on all ranks at once takes the makespan
            report = train.step(inputs, targets, kwargs, weights=[each.numel() for each in targets])
            optimizer.step()
            optimizer.zero_grad()
            assert train.schedule is not None
            seen.append((report.step_ms, train.schedule.makespan_ms, report.loss, report.excess is None))
            files[number % len(WAYS)] = train.schedule
        by_rank = pipe.gather(seen)
    together = list(zip(*by_rank, strict=True))  # by step and rank
    ways = [
        Way(
            name,
            predicted_ms=[step[0][1] for step in together[WARM_UP + k :: len(WAYS)]],
            measured_ms=[max(ms for ms, *_ in step) for step in together[WARM_UP + k :: len(WAYS)]],
            file=schedule_file(files[k]),
        )
        for k, name in enumerate(WAYS)
    ]
    losses = [next(loss for _, _, loss, _ in step if loss is not None) for step in together]
    return Result(ways, losses, all(within for step in together for *_, within in step))


Given = tuple[Microbatches, Microbatches, dict[str, Microbatches]]  # inputs, targets, named arguments


def given(step: Sequence[Microbatch], sleeping: bool) -> Given:
    """What a step gets. Of stages that sleep the inputs are what passes between them."""
    inputs, targets, lengths = map(Microbatches, zip(*step, strict=True))
    if sleeping:
        inputs = Microbatches(torch.zeros(each.numel(), paced.PACKED_WIDTH) for each in inputs)
    return inputs, targets, {"lengths": lengths}


def main() -> None:
    """`python -m optpipe_runtime.fidelity.packed TASK RESULT`, under torchrun."""
    task = load(Task, Path(sys.argv[1]))
    measure_on_ranks(lambda: run(task), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
