"""The training of `optpipe demo`, one process on each rank, started by torchrun. It profiles, asks the service, trains,
swaps schedules, and saves what it measured.

While the service solves, every schedule that it finds is swapped in (the live phase). The solver shares the cores with
the ranks then, so the gain is measured afterwards: in the quiet phase the first and the best schedule alternate, a few
steps each, so that other load on the machine affects both.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from optpipe import Problem, Schedule, certify
from optpipe.model.placement import Placement
from optpipe_runtime.demo import gpt
from optpipe_runtime.demo.on_ranks import load, measure_on_ranks, schedule_file
from optpipe_runtime.demo.text import batch, corpus
from optpipe_runtime.lowering.prepare import one_at_a_time
from optpipe_runtime.pipeline import Pipeline
from optpipe_runtime.service.client import Offer, ScheduleClient


@dataclass(frozen=True)
class DemoSettings:
    """How large the training is and how long it takes. `budget` is each rank's memory, in activations of all its stages
    for one micro-batch; `chunks` are the stages of a rank, looped; `start` is the method of the first schedule."""

    microbatches: int = 4
    budget: float = 1.8
    chunks: int = 2
    start: str = "po-f"
    first_s: float = 20.0  # how long to wait for a first schedule of the service
    options: dict[str, Any] = field(default_factory=lambda: {"time_limit_s": 20.0})  # of the search
    block: int = 5  # steps that a schedule runs before another is swapped in
    rounds: int = 10  # of the quiet phase
    turn: int = 2  # measured steps of each of the two schedules in a round
    most_live_steps: int = 60
    size: gpt.Size = field(default_factory=gpt.Size)


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
    """What the training saves: the problem, the schedules in the order of their first use, and the steps."""

    problem: dict[str, Any]
    schedules: list[dict[str, Any]]
    steps: list[Step]


class Training:
    """This rank's stage, optimizer and data, and what all ranks have measured."""

    def __init__(self, plan: DemoSettings) -> None:
        self.plan, self.rank, self.ranks = plan, dist.get_rank(), dist.get_world_size()
        self._text = corpus()
        placement = Placement(chunks=plan.chunks).along(range(self.ranks))
        own = {s: stage for s, stage in enumerate(gpt.stages(plan.size, len(placement))) if placement[s] == self.rank}
        self._optimizer = gpt.optimizer(own.values())
        self.pipe = Pipeline(own, placement, gpt.loss, plan.microbatches)
        self.schedules: list[Schedule] = []
        self.steps: list[Step] = []

    def data(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return batch(self._text, step, self.plan.microbatches * self.plan.size.sequences, self.plan.size.context)

    def profile(self) -> Problem:
        """The model as a problem, with so little memory that 1F1B does not fit: on p ranks its first rank keeps p
        activations or more."""
        profiled = self.pipe.profile(*self.data(0), activation_budget_bytes=2**40)
        self.pipe.problem = profiled.with_memory_for(self.plan.budget).replace(name="demo")
        return self.pipe.problem

    def step(self, live: bool) -> None:
        """Collective: one training step."""
        self._optimizer.zero_grad()
        report = self.pipe.step(*self.data(len(self.steps)))
        self._optimizer.step()
        by_rank = self.pipe.gather(
            (report.loss, report.step_ms, report.peak_activation_bytes or 0, report.host_peak_bytes)
        )
        losses, ms, peaks, host_peaks = zip(*by_rank, strict=True)
        version = self._version()
        settled = bool(self.steps) and self.steps[-1].version == version
        loss = next(loss for loss in losses if loss is not None)
        self.steps.append(Step(version, live, settled, loss, max(ms), list(peaks), list(host_peaks)))

    def _version(self) -> int:
        now = self.pipe.schedule
        assert now is not None
        if now not in self.schedules:
            self.schedules.append(now)
            self.tell(f"step {len(self.steps):3}: {now.method}, predicted {now.makespan_ms:.0f} ms")
        return self.schedules.index(now)

    def tell(self, text: str) -> None:
        """Prints a line, once over all ranks."""
        if self.rank == 0:
            print(text, flush=True)


def train(plan: DemoSettings, url: str) -> DemoResult:
    """Collective: runs both phases."""
    training = Training(plan)
    with training.pipe:
        training.tell("measuring the stages")
        problem = training.profile()
        start = _start(url, problem, plan) if training.rank == 0 else None
        training.pipe.load(start)
        client = ScheduleClient(url, problem, warm_start=start, **plan.options) if training.rank == 0 else None
        try:
            training.tell("training while the service searches")
            offers = _live(training, client)
            training.tell(f"the search is over: {plan.rounds} rounds of the first and the best schedule in turns")
            alternate(training)
            if client:
                _tell(training, client, offers)
        finally:
            if client:
                client.close()
    return DemoResult(problem.to_dict(), [_row(schedule) for schedule in training.schedules], training.steps)


def alternate(training: Training) -> None:
    """Collective: the quiet phase, the first and the best schedule in turns."""
    best = min(training.schedules, key=lambda schedule: schedule.makespan_ms)
    for _ in range(training.plan.rounds):
        for schedule in (training.schedules[0], best):
            training.pipe.load(schedule)
            for _ in range(training.plan.turn + 1):
                training.step(live=False)


def _live(training: Training, client: ScheduleClient | None) -> list[Offer]:
    """Trains while the service solves; returns what it offered. A schedule runs for a block of steps before the next
    one is taken."""
    swapped_at, offers = 0, []
    gather, most = training.pipe.gather, training.plan.most_live_steps
    while gather(client is None or not client.ended)[0] and len(training.steps) < most:
        if client and len(training.steps) - swapped_at >= training.plan.block and (offer := client.poll()):
            training.pipe.offer(offer.schedule)
            offers.append(offer)
            swapped_at = len(training.steps)
        training.step(live=True)
    if client and (offer := client.poll()):
        training.pipe.offer(offer.schedule)
        offers.append(offer)
    for _ in range(training.plan.block):
        training.step(live=False)
    return offers


def _tell(training: Training, client: ScheduleClient, offers: list[Offer]) -> None:
    """Tells the service which of its schedules were swapped in, and the median step time, from the quiet phase if the
    schedule ran then."""
    for offer in offers:
        if offer.schedule in training.schedules:
            version = training.schedules.index(offer.schedule)
            steps = [(k, step) for k, step in enumerate(training.steps) if step.version == version]
            settled = [step for _, step in steps if step.settled]
            quiet = [step.ms for step in settled if not step.live] or [step.ms for step in settled]
            client.adopted(offer, steps[0][0], median(quiet) if quiet else None)


def _start(url: str, problem: Problem, plan: DemoSettings) -> Schedule:
    """The schedule that a user would run without a solver: a published one, which the service sends at once."""
    with ScheduleClient(url, problem, method=plan.start, time_limit_s=plan.first_s) as client:
        deadline = time.monotonic() + plan.first_s
        while time.monotonic() < deadline and not client.ended:
            if offer := client.poll():
                return offer.schedule
            time.sleep(0.05)
        offer = client.poll()
    return offer.schedule if offer else one_at_a_time(problem)


def _row(schedule: Schedule) -> dict[str, Any]:
    peaks = certify(schedule.problem, schedule).device
    return {
        "method": schedule.method,
        "predicted_ms": schedule.makespan_ms,
        "predicted_peak_bytes": [peak.bytes for peak in peaks],
        "file": schedule_file(schedule),
    }


def main() -> None:
    """`python -m optpipe_runtime.demo.train SETTINGS URL RESULT`, under torchrun."""
    plan, url = load(DemoSettings, Path(sys.argv[1])), sys.argv[2]
    measure_on_ranks(lambda: train(plan, url), Path(sys.argv[3]))


if __name__ == "__main__":
    main()
