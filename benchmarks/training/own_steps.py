"""What a schedule for every step costs the steps: the same micro-batches by `PlannedSteps`, and by the plans that it
has made, kept. Stages sleep as in `optpipe demo --packed`. `executor` starts this by torchrun.

Rounds of both take turns. Whole steps count, with what stands between two of them in the loop, but not the first of a
round, before which there is no step to plan it in.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from optpipe_cli import demo_packed
from optpipe_runtime import Pipeline, PlannedSteps
from optpipe_runtime.demo.text import corpus, documents, packed
from optpipe_runtime.fidelity import paced
from optpipe_runtime.fidelity.on_ranks import measure_on_ranks
from optpipe_runtime.fidelity.packed import Given, features, given
from optpipe_runtime.step_runner import PlannedStep

TASK = demo_packed.tasks()[1]  # of the stages that sleep
STEPS, ROUNDS = 10, 4


@dataclass(frozen=True)
class OwnSteps:
    """Of the fastest round, in ms of a step on the slowest rank: other processes only add. `error` is the mean of how
    far steps are from the times that were predicted for them."""

    steps: int
    planned_ms: float
    kept_ms: float
    error: float

    @property
    def overhead(self) -> float:
        return self.planned_ms / self.kept_ms - 1


def batches() -> list[Given]:
    """Packed documents, in a number of micro-batches that changes."""
    cut = documents(corpus(), TASK.size.context)
    return [given(packed(cut, k, TASK.microbatches + k % 3, TASK.documents), sleeping=True) for k in range(STEPS)]


def own_steps(pipe: Pipeline) -> OwnSteps:
    """Collective."""
    steps, kept, errors = batches(), list[PlannedStep](), list[float]()
    with PlannedSteps(pipe, features, activation_budget_bytes=10**9) as train:
        run = train._runner.planned_step

        def keeping(batch: Any, plan: Callable[[], PlannedStep]) -> Any:
            report = run(batch, plan)
            kept.append(plan())
            return report

        def planned() -> Iterator[None]:
            kept.clear()
            with patch.object(train._runner, "planned_step", keeping):
                for batch in train.ahead(steps):
                    report = train.step(*batch)
                    errors.append(report.step_ms / kept[-1].plan.schedule.makespan_ms - 1)
                    yield

        def by_kept() -> Iterator[None]:
            for batch, plan in zip(steps, kept, strict=True):
                with pipe._calls.wrap("step"):
                    run(pipe._batch(*batch, timed=True), partial(PlannedStep, *plan))
                yield

        _ms(planned())  # learns
        errors.clear()
        took = [tuple(max(pipe.gather(_ms(steps()))) for steps in (planned, by_kept)) for _ in range(ROUNDS)]
    planned_ms, kept_ms = (min(column) for column in zip(*took, strict=True))
    slowest = [max(column) for column in zip(*pipe.gather(errors), strict=True)]
    return OwnSteps((STEPS - 1) * ROUNDS, planned_ms, kept_ms, sum(map(abs, slowest)) / len(slowest))


def _ms(steps: Iterator[None]) -> float:
    """Of one step, without the first."""
    next(steps)
    begun = time.perf_counter()
    count = sum(1 for _ in steps)
    return (time.perf_counter() - begun) * 1e3 / count


def _measure() -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert TASK.paced_ms is not None
    with Pipeline({rank: paced.Stage(TASK.paced_ms)}, range(ranks), paced.loss, TASK.microbatches) as pipe:
        return asdict(own_steps(pipe))


if __name__ == "__main__":
    measure_on_ranks(_measure, Path(sys.argv[1]))
