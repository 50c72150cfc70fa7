"""The training of the demo, on each rank. It profiles, asks the service, trains, swaps schedules, and measures.

While the service searches, each better schedule is swapped in (the live phase). The solver shares the cores with the
ranks then, so the gain is measured afterwards: in the quiet phase the first and the best schedule alternate, a few
steps each, so that other load on the machine affects both.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch.distributed as dist

from examples import gpt
from examples.text import batch, corpus
from optpipe import Problem, Schedule
from optpipe.model.placement import Placement
from optpipe_runtime import Follower, Pipeline
from optpipe_runtime.execute.report import StepReport
from optpipe_runtime.lowering.prepare import one_at_a_time
from optpipe_runtime.service.client import ScheduleClient


@dataclass(frozen=True)
class DemoSettings:
    """How large the training is and how long it takes. `budget` is each rank's memory, in activations of all its stages
    for one micro-batch; `chunks` are the stages of a rank, looped; `start` is the method of the first schedule."""

    microbatches: int = 8
    budget: float = 1.35  # of two that 1F1B needs: it fits only if it recomputes
    chunks: int = 1
    start: str = "1f1b-recompute"
    first_s: float = 20.0  # how long to wait for a first schedule of the service
    options: dict[str, Any] = field(default_factory=lambda: {"time_limit_s": 15.0})  # of the search
    block: int = 3  # steps after the end of the search, in which its last schedule is swapped in
    rounds: int = 6  # of the quiet phase
    turn: int = 2  # measured steps of each of the two schedules in a round
    most_live_steps: int = 40
    size: gpt.Size = field(default_factory=lambda: gpt.Size(sequences=2))


@dataclass(frozen=True)
class Step:
    """What was measured in one step, over all ranks."""

    version: int  # of the schedule, counted from 0
    live: bool  # whether the solver was running at the same time
    settled: bool  # false for the first step after a swap
    loss: float
    ms: float  # the slowest rank's
    peak_bytes: list[int]  # zeros where they were not counted
    host_peak_bytes: list[int]


@dataclass(frozen=True)
class DemoResult:
    """The problem, the schedules in the order of their first use, and the steps."""

    problem: Problem
    schedules: list[Schedule]
    steps: list[Step]

    @property
    def best(self) -> int:
        """The version of the shortest schedule, as predicted."""
        return min(range(len(self.schedules)), key=lambda version: self.schedules[version].makespan_ms)


class Training:
    """This rank's stage, optimizer and data, and what all ranks have measured."""

    def __init__(self, settings: DemoSettings) -> None:
        self.settings, self.rank, ranks = settings, dist.get_rank(), dist.get_world_size()
        self._text = corpus()
        placement = Placement(chunks=settings.chunks).along(range(ranks))
        modules = gpt.stages(settings.size, len(placement))
        own = {s: module for s, module in enumerate(modules) if placement[s] == self.rank}
        self._optimizer = gpt.optimizer(own.values())
        self.pipe = Pipeline(own, placement, gpt.loss, settings.microbatches)
        self.schedules: list[Schedule] = []
        self.steps: list[Step] = []

    def profile(self) -> Problem:
        """The model as a problem, with so little memory that 1F1B does not fit."""
        inputs, targets = self._data(0)
        profiled = self.pipe.profile(inputs, targets, activation_budget_bytes=2**40)
        self.pipe.problem = profiled.with_memory_for(self.settings.budget).replace(name="demo")
        return self.pipe.problem

    def step(self, trainer: Pipeline | Follower, live: bool) -> None:
        """Collective: one training step."""
        self._optimizer.zero_grad()
        report = trainer.step(*self._data(len(self.steps)))
        self._optimizer.step()
        by_rank: list[StepReport] = self.pipe.gather(report)
        version = self._version()
        self.steps.append(
            Step(
                version,
                live,
                settled=bool(self.steps) and self.steps[-1].version == version,
                loss=next(each.loss for each in by_rank if each.loss is not None),
                ms=max(each.step_ms for each in by_rank),
                peak_bytes=[each.peak_activation_bytes or 0 for each in by_rank],
                host_peak_bytes=[each.host_peak_bytes for each in by_rank],
            )
        )

    def _data(self, step: int) -> Any:
        settings = self.settings
        return batch(self._text, step, settings.microbatches * settings.size.sequences, settings.size.context)

    def _version(self) -> int:
        now = self.pipe.schedule
        assert now is not None
        if now not in self.schedules:
            self.schedules.append(now)
            step, number = len(self.steps) + 1, len(self.schedules)
            self.log(f"step {step:3}: schedule {number}, {now.method}, predicted {now.makespan_ms:.0f} ms")
        return self.schedules.index(now)

    def log(self, text: str) -> None:
        """Prints a line, once over all ranks."""
        if self.rank == 0:
            print(text, flush=True)


def train(settings: DemoSettings, url: str) -> DemoResult:
    """Collective: runs both phases."""
    training = Training(settings)
    with training.pipe as pipe:
        training.log("measuring the stages")
        problem = training.profile()
        pipe.load(_start(url, problem, settings) if training.rank == 0 else None)
        training.log("training while the service searches")
        with Follower(pipe, url, threshold=inf, **settings.options) as follow:
            left = settings.block
            while left and len(training.steps) < settings.most_live_steps:
                over = pipe.gather(follow.ended)[0]
                training.step(follow, live=not over)
                left -= over and not pipe.preparing
        training.log(f"the search is over: {settings.rounds} rounds of the first and the best schedule in turns")
        best = min(training.schedules, key=lambda schedule: schedule.makespan_ms)
        for _ in range(settings.rounds):
            for schedule in (training.schedules[0], best):
                pipe.load(schedule)
                for _ in range(settings.turn + 1):
                    training.step(pipe, live=False)
    return DemoResult(problem, training.schedules, training.steps)


def _start(url: str, problem: Problem, settings: DemoSettings) -> Schedule:
    """The schedule that a user would run without a solver: a published one, which the service sends at once."""
    with ScheduleClient(url, problem, method=settings.start, time_limit_s=settings.first_s) as client:
        deadline = time.monotonic() + settings.first_s
        while not (offer := client.poll()) and not client.ended and time.monotonic() < deadline:
            time.sleep(0.05)
        offer = offer or client.poll()
    return offer.schedule if offer else one_at_a_time(problem)
