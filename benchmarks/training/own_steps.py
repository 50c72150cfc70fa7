"""What a schedule for every step costs the steps: the same micro-batches by `PlannedSteps`, and by schedules that it
has made, loaded. Stages sleep as in `optpipe demo --packed`. `executor` starts this by torchrun.

Rounds of both take turns. Whole steps count, with what stands between two of them in the loop, but not the first of a
round, before which there is no step to plan it in, nor the first by a loaded schedule.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from optpipe.schedule import Schedule
from optpipe_cli import demo_packed
from optpipe_runtime import Pipeline, PlannedSteps
from optpipe_runtime.demo.on_ranks import measure_on_ranks
from optpipe_runtime.demo.text import corpus, documents, packed
from optpipe_runtime.fidelity import paced
from optpipe_runtime.fidelity.packed import Given, Task, features, given

TASK = demo_packed.tasks()[1]  # of the stages that sleep
BATCHES, STEPS, ROUNDS = 3, 3, 4  # steps of each batch in a round


@dataclass(frozen=True)
class OwnSteps:
    """Of the fastest round, in ms of a step on the slowest rank: other processes only add. `error` is the mean of how
    far planned steps are from the times that were predicted for them."""

    steps: int
    planned_ms: float
    loaded_ms: float
    error: float

    @property
    def overhead(self) -> float:
        return self.planned_ms / self.loaded_ms - 1


def batches(task: Task) -> list[Given]:
    """Packed documents, in different numbers of micro-batches."""
    cut = documents(corpus(), task.size.context)
    return [given(packed(cut, k, task.microbatches + k, task.documents), sleeping=True) for k in range(BATCHES)]


def own_steps(task: Task, rounds: int = ROUNDS) -> OwnSteps:
    """Collective: one paced stage a rank."""
    assert task.paced_ms is not None
    rank, ranks, each = dist.get_rank(), dist.get_world_size(), batches(task)
    schedules: list[Schedule] = []  # of the batches
    errors: list[float] = []
    with (
        Pipeline({rank: paced.Stage(task.paced_ms)}, range(ranks), paced.loss, task.microbatches) as pipe,
        PlannedSteps(pipe, features, activation_budget_bytes=10**9) as train,
    ):

        def planned_ms() -> float:
            errors.clear()
            schedules.clear()

            def run(batch: Given) -> None:
                report = train.step(*batch)
                assert train.schedule is not None
                schedules.append(train.schedule)
                errors.append(report.step_ms / train.schedule.makespan_ms - 1)

            return _ms(run, train.ahead([each[-1], *each * STEPS])) / (STEPS * BATCHES)

        def loaded_step(batch: Given) -> None:
            inputs, targets, kwargs = batch
            pipe.step(inputs, targets, kwargs=kwargs)

        def loaded_ms() -> float:
            total = 0.0
            for batch, schedule in zip(each, schedules[-BATCHES:], strict=True):
                pipe.load(schedule)
                total += _ms(loaded_step, [batch] * (1 + STEPS))
            return total / (STEPS * BATCHES)

        planned_ms()  # learns
        took, seen = [], []
        for _ in range(rounds):
            took.append([max(pipe.gather(ms())) for ms in (planned_ms, loaded_ms)])
            seen += [max(of_ranks) for of_ranks in zip(*pipe.gather(errors), strict=True)]
    planned, loaded = (min(column) for column in zip(*took, strict=True))
    return OwnSteps(STEPS * BATCHES * rounds, planned, loaded, sum(map(abs, seen)) / len(seen))


def _ms(run: Callable[[Any], object], batches: Iterable[Any]) -> float:
    """Of all steps but the first."""
    steps = iter(batches)
    run(next(steps))
    begun = time.perf_counter()
    for batch in steps:
        run(batch)
    return (time.perf_counter() - begun) * 1e3


if __name__ == "__main__":
    measure_on_ranks(lambda: asdict(own_steps(TASK)), Path(sys.argv[1]))
