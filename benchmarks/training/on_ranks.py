"""What trainings on several ranks take: steps in a row, a swap, a schedule for every step. Stages sleep.

Swaps offer the same schedule again and again while a pipeline trains by it, so that only the swap makes a difference.
During one or more steps an offer is shared and prepared, in a thread of each rank; at the boundary before the last of
these steps it is swapped in, and that step is on trial.

A schedule for every step is compared with the same schedules loaded, and with those for equal micro-batches, in rounds
that take turns. Whole steps count, with
what stands between two of them in the loop, but not the first of a round, before which there is no step to plan it in,
nor the first by a loaded schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.timing import timed
from examples import paced
from examples.text import corpus, documents, packed
from optpipe.anytime import solve
from optpipe.model.problem import Problem
from optpipe.model.records import of_microbatch
from optpipe.schedule import Schedule
from optpipe_runtime import Microbatches, Pipeline, PlannedSteps

WARM_UP = 3
MICROBATCHES = 8
IN_A_ROW_STEPS, IN_A_ROW_TIMES, MAX_NORM = 20, paced.Times(20.0, 20.0, 20.0, 0.0), 1e6
METHOD = "zb-h2"  # a schedule without bubbles: its makespan is longer than its span by 3 forwards
BETWEEN, SWAPS, SWAP_TIMES = 3, 15, paced.Times(4.0, 4.0, 3.0, 0.0)
OWN_TIMES = paced.Times(20.0, 20.0, 12.0, 0.0, saved=2)
BATCHES, BATCH_STEPS, ROUNDS = 3, 3, 4  # steps of each batch in a round


@dataclass(frozen=True)
class InARow:
    """Times in ms, by the host's clock: from the begin of the first of `steps` on any rank to the end of the last
    optimizer step on any rank."""

    steps: int
    span_ms: float  # as predicted, of one step
    makespan_ms: float
    post_validated_ms: float  # measured, with `post_validate`
    clipped_ms: float  # with `clip_grad_norm_` before each optimizer step

    @property
    def spans_ms(self) -> float:
        """As many spans, one fill and one drain."""
        return self.steps * self.span_ms + self.makespan_ms - self.span_ms

    @property
    def deviation(self) -> float:
        """The measured time relative to the predicted one, less 1."""
        return self.post_validated_ms / self.spans_ms - 1


def in_a_row(times: paced.Times = IN_A_ROW_TIMES, steps: int = IN_A_ROW_STEPS) -> InARow:
    """Collective: measures on paced stages, one on each rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stage = paced.SleepingStage(times)
    optimizer = torch.optim.SGD(stage.parameters(), lr=1.0)
    x = torch.zeros(MICROBATCHES * paced.SHAPE[0], *paced.SHAPE[1:])
    with Pipeline({rank: stage}, range(ranks), paced.loss, MICROBATCHES) as pipe:
        problem = pipe.profile(x, x, activation_budget_bytes=2**50)
        pipe.load(solve(problem, method=METHOD, time_limit_s=10).schedule if rank == 0 else None)
        assert pipe.schedule is not None
        span_ms, makespan_ms = pipe.schedule.span_ms, pipe.schedule.makespan_ms

        def run(clipping: bool, steps: int) -> float:
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(steps):
                pipe.step(x, x)
                stage.weight.grad = torch.ones_like(stage.weight)  # a paced stage computes none
                if clipping:
                    pipe.clip_grad_norm_(MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            seen: list[tuple[float, float]] = pipe.gather((begun, time.perf_counter()))
            return 1e3 * (max(end for _, end in seen) - min(begin for begin, _ in seen))

        run(True, WARM_UP)
        clipped_ms = run(True, steps)
        pipe.post_validate(optimizer, MAX_NORM)
        run(False, WARM_UP)
        return InARow(steps, span_ms, makespan_ms, run(False, steps), clipped_ms)


@dataclass(frozen=True)
class SwapCost:
    """Medians in ms of whole calls of `Pipeline.step` on the slowest rank."""

    swaps: int
    step_ms: float  # of steps without an offer
    prepared_ms: float  # of steps during which the offer was shared and prepared
    swapped_ms: float  # of the first step by the new schedule

    @property
    def ratio(self) -> float:
        """The time of a step with a swap relative to one without."""
        return self.swapped_ms / self.step_ms

    @property
    def prepared_ratio(self) -> float:
        return self.prepared_ms / self.step_ms


def swap_cost(swaps: int = SWAPS) -> SwapCost:
    """Collective: measures on paced stages, one on each rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.zeros(MICROBATCHES * paced.SHAPE[0], *paced.SHAPE[1:])
    times: dict[str, list[float]] = {"plain": [], "prepared": [], "swapped": []}
    with Pipeline({rank: paced.SleepingStage(SWAP_TIMES)}, range(ranks), paced.loss, MICROBATCHES) as pipe:
        problem = pipe.profile(x, x, activation_budget_bytes=2**50)
        pipe.load(solve(problem, method="zb-h1", time_limit_s=10).schedule if rank == 0 else None)
        assert pipe.schedule is not None

        def step() -> float:
            _, took_ms = timed(lambda: pipe.step(x, x))
            slowest: float = max(pipe.gather(took_ms))
            return slowest

        for _ in range(WARM_UP):
            step()
        for _ in range(swaps):
            times["plain"] += [step() for _ in range(BETWEEN)]
            version = pipe.version
            if pipe.number == 0:
                pipe.offer(pipe.schedule)
            times["prepared"].append(step())
            while pipe.preparing:
                took = step()
                times["swapped" if pipe.version != version else "prepared"].append(took)
    return SwapCost(len(times["swapped"]), *(median(times[kind]) for kind in ("plain", "prepared", "swapped")))


@dataclass(frozen=True)
class OwnSteps:
    """Of the fastest round, in ms of a step on the slowest rank: other processes only add. `error` is the mean of how
    far planned steps are from the times that were predicted for them."""

    steps: int
    planned_ms: float
    loaded_ms: float  # by the same schedules
    fixed_ms: float  # by the best ones for equal micro-batches, which take the mean time
    error: float

    @property
    def overhead(self) -> float:
        return self.planned_ms / self.loaded_ms - 1

    @property
    def gain(self) -> float:
        return 1 - self.planned_ms / self.fixed_ms


Batch = tuple[Microbatches, Microbatches, dict[str, Microbatches]]  # inputs, targets, named arguments


def batches(microbatches: int, together: int) -> list[Batch]:
    """Packed documents for stages that sleep: in different numbers of micro-batches, of so many documents each."""
    cut = documents(corpus(), paced.LONG)
    steps = [packed(cut, k, microbatches + k, together) for k in range(BATCHES)]
    return [
        (
            Microbatches(torch.zeros(each.targets.numel(), paced.PACKED_WIDTH) for each in step),
            Microbatches(each.targets for each in step),
            {"lengths": Microbatches(each.lengths for each in step)},
        )
        for step in steps
    ]


def features(inputs: Tensor, lengths: Tensor) -> dict[str, float]:
    """Of one micro-batch: its tokens, and what attention within documents follows from."""
    return {"tokens": float(lengths.sum()), "squares": float(lengths.square().sum())}


def equal_microbatches(step: Problem) -> Problem:
    """A step whose micro-batches all take the mean time of these, and as many bytes as the largest."""
    stages = [
        stage.model_copy(
            update={name: (max if name.endswith("_bytes") else mean)(figures) for name, figures in stage.lists()}
        )
        for stage in step.stages
    ]
    return step.replace(stages=stages, p2p_ms=mean(of_microbatch(step.p2p_ms, j) for j in range(step.microbatches)))


def own_steps(
    times: paced.Times = OWN_TIMES, microbatches: int = MICROBATCHES, together: int = 4, rounds: int = ROUNDS
) -> OwnSteps:
    """Collective: one paced stage a rank, with memory for what 1F1B needs for the largest documents."""
    rank, ranks, each = dist.get_rank(), dist.get_world_size(), batches(microbatches, together)
    budget = ranks * (times.saved + 2) * together * paced.LONG * paced.PACKED_WIDTH * 4
    planned: list[Schedule] = []  # of the batches
    errors: list[float] = []
    with (
        Pipeline({rank: paced.SleepingStage(times)}, range(ranks), paced.loss, microbatches) as pipe,
        PlannedSteps(pipe, features, activation_budget_bytes=budget) as train,
    ):

        def planned_ms() -> float:
            errors.clear()
            planned.clear()

            def run(batch: Batch) -> None:
                report = train.step(*batch)
                assert train.schedule is not None
                planned.append(train.schedule)
                errors.append(report.step_ms / train.schedule.makespan_ms - 1)

            return _ms(run, train.ahead([each[-1], *each * BATCH_STEPS])) / (BATCH_STEPS * BATCHES)

        def loaded_step(batch: Batch) -> None:
            inputs, targets, kwargs = batch
            pipe.step(inputs, targets, kwargs=kwargs)

        def loaded_ms(schedules: Sequence[Schedule]) -> float:
            total = 0.0
            for batch, schedule in zip(each, schedules, strict=True):
                pipe.load(schedule)
                total += _ms(loaded_step, [batch] * (1 + BATCH_STEPS))
            return total / (BATCH_STEPS * BATCHES)

        def fixed(step: Problem) -> Schedule:
            found = solve(equal_microbatches(step), time_limit_s=10) if rank == 0 else None
            schedule: Schedule = pipe.gather(found and found.schedule)[0]
            return Schedule(step, schedule.programs, schedule.links, schedule.method)

        planned_ms()  # learns
        of_equal = [fixed(schedule.problem) for schedule in planned[-BATCHES:]]
        took, seen = [], []
        for _ in range(rounds):
            ways = planned_ms(), loaded_ms(planned[-BATCHES:]), loaded_ms(of_equal)
            took.append([max(pipe.gather(ms)) for ms in ways])
            seen += [max(of_ranks) for of_ranks in zip(*pipe.gather(errors), strict=True)]
    planned_best, loaded, equal = (min(column) for column in zip(*took, strict=True))
    return OwnSteps(BATCH_STEPS * BATCHES * rounds, planned_best, loaded, equal, sum(map(abs, seen)) / len(seen))


def _ms(run: Callable[[Any], object], batches: Iterable[Any]) -> float:
    """Of all steps but the first."""
    steps = iter(batches)
    run(next(steps))
    begun = time.perf_counter()
    for batch in steps:
        run(batch)
    return (time.perf_counter() - begun) * 1e3
