"""What a schedule for every step costs the steps: the same micro-batches by `PlannedSteps`, and by the plans that it
has made, kept. Stages sleep in proportion to the rows of a micro-batch. `executor` starts this by torchrun.

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

import torch
import torch.distributed as dist
from torch import Tensor

from optpipe_runtime import Microbatches, Pipeline, PlannedSteps
from optpipe_runtime.fidelity import paced
from optpipe_runtime.fidelity.on_ranks import measure_on_ranks
from optpipe_runtime.step_runner import PlannedStep

TIMES = paced.Times(10.0, 10.0, 8.0, 0.0)  # of ROWS rows
ROWS, WIDTH, MICROBATCHES, STEPS, ROUNDS = 32, 64, 8, 12, 5


class Stage(paced.Stage):
    """Its times are in proportion to the rows of a micro-batch."""

    def forward(self, x: Tensor) -> Tensor:
        share = x.shape[0] / ROWS
        times = self.times._replace(**{name: share * getattr(self.times, name) for name in self.times._fields[:3]})
        result: Tensor = paced._Sleep.apply(x, self.weight, times)  # type: ignore[no-untyped-call]
        return result


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


def batches() -> list[tuple[Microbatches, Microbatches]]:
    """Of very different sizes, in a number that changes."""
    generator = torch.Generator().manual_seed(0)
    steps = []
    for k in range(STEPS):
        rows = (ROWS * torch.randn(MICROBATCHES + k % 3, generator=generator).mul(0.5).exp()).int().clamp(8, 128)
        data = Microbatches(torch.zeros(int(n), WIDTH) for n in rows)
        steps.append((data, data))
    return steps


def own_steps(pipe: Pipeline) -> OwnSteps:
    """Collective."""
    steps, kept, errors = batches(), list[PlannedStep](), list[float]()
    with PlannedSteps(pipe, lambda x: {"rows": float(x.shape[0])}, activation_budget_bytes=10**9) as train:
        run = train._runner.planned_step

        def keeping(batch: Any, plan: Callable[[], PlannedStep]) -> Any:
            report = run(batch, plan)
            kept.append(plan())
            return report

        def planned() -> Iterator[None]:
            kept.clear()
            with patch.object(train._runner, "planned_step", keeping):
                for inputs, targets in train.ahead(steps):
                    report = train.step(inputs, targets)
                    errors.append(report.step_ms / kept[-1].plan.schedule.makespan_ms - 1)
                    yield

        def by_kept() -> Iterator[None]:
            for (inputs, targets), plan in zip(steps, kept, strict=True):
                batch = pipe._batch(inputs, targets, None, timed=True)
                with pipe._calls.wrap("step"):
                    run(batch, partial(PlannedStep, *plan))
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
    with Pipeline({rank: Stage(TIMES)}, range(ranks), paced.loss, MICROBATCHES) as pipe:
        return asdict(own_steps(pipe))


if __name__ == "__main__":
    measure_on_ranks(_measure, Path(sys.argv[1]))
