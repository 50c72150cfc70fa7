"""`Adoptions`: tells the service which of its schedules the training has swapped in, and what a step takes by each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from optpipe.schedule import Schedule
from optpipe_runtime.service.client import Offer, ScheduleClient

MOST_STEPS = 1024  # that a figure is made of


class Adoptions:
    """On the rank that has the client; elsewhere nothing is offered, and there is nothing to tell. A figure is told
    when there are twice as many steps to make it of as before, and when no more come."""

    def __init__(self) -> None:
        self._offered: tuple[ScheduleClient, Offer] | None = None
        self._runs: dict[int, _Run] = {}  # by version of the pipeline's schedule

    def offered(self, client: ScheduleClient, offer: Offer) -> None:
        """The pipeline has it, and may swap it in or refuse it."""
        self._offered = client, offer

    def swapped(self, version: int, running: Schedule, step: int) -> None:
        """From this step on another schedule runs: what was offered, or one that the pipeline went back to."""
        if self._offered is None:
            return
        client, offer = self._offered
        if (running.programs, running.links) == (offer.schedule.programs, offer.schedule.links):
            self._offered = None
            self._runs[version] = _Run(client, offer, step)
            client.adopted(offer, step)

    def measured(self, steps: Iterable[tuple[int, float]]) -> None:
        """What further steps took, each with the version of its schedule: ms of the slowest rank."""
        for version, ms in steps:
            if run := self._runs.get(version):
                run.add(ms)
        for version, run in list(self._runs.items()):
            if len(run.settled) >= 2 * run.told:
                self._tell(run)
            if version != max(self._runs):
                self._tell(self._runs.pop(version))

    def finish(self) -> None:
        """What is measured from now on is no longer comparable."""
        while self._runs:
            self._tell(self._runs.popitem()[1])

    def _tell(self, run: _Run) -> None:
        if len(run.settled) > run.told:
            run.told = len(run.settled)
            run.client.adopted(run.offer, run.step, round(median(run.settled), 3))


@dataclass
class _Run:
    """An offer that runs since a step."""

    client: ScheduleClient
    offer: Offer
    step: int
    warm: bool = False  # the first step after a swap is none to measure
    settled: list[float] = field(default_factory=list)  # ms
    told: int = 0  # of how many steps the last figure was

    def add(self, ms: float) -> None:
        if self.warm and len(self.settled) < MOST_STEPS:
            self.settled.append(ms)
        self.warm = True
