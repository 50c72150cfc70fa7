"""`Adoptions`: tells the service which of its schedules the training has swapped in, and how long a step takes by
each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from optpipe.schedule import Schedule
from optpipe_runtime.service.client import Offer, ScheduleClient

MOST_STEPS = 1024  # that one median is over


class Adoptions:
    """Used on the rank that has the client; on other ranks nothing is offered, so there is nothing to tell. A median is
    told whenever it is over twice as many steps as before, and when no more steps come."""

    def __init__(self) -> None:
        self._offered: tuple[ScheduleClient, Offer] | None = None
        self._runs: dict[int, _Run] = {}  # by version of the pipeline's schedule

    def offered(self, client: ScheduleClient, offer: Offer) -> None:
        """The pipeline has been given an offer, and may swap it in or refuse it."""
        self._offered = client, offer

    def swapped(self, version: int, running: Schedule, step: int) -> None:
        """From this step on another schedule runs: the offered one, or one that the pipeline went back to."""
        if self._offered is None:
            return
        client, offer = self._offered
        if (running.programs, running.links) == (offer.schedule.programs, offer.schedule.links):
            self._offered = None
            self._runs[version] = _Run(client, offer, step)
            client.adopted(offer, step)

    def measured(self, steps: Iterable[tuple[int, float]]) -> None:
        """Takes the times of further steps, each with the version of its schedule: ms of the slowest rank."""
        for version, ms in steps:
            if run := self._runs.get(version):
                run.add(ms)
        for version, run in list(self._runs.items()):
            if len(run.times_ms) >= 2 * run.told:
                self._tell(run)
            if version != max(self._runs):
                self._tell(self._runs.pop(version))

    def finish(self) -> None:
        """Tells what is left to tell: times from now on are not comparable any more."""
        while self._runs:
            self._tell(self._runs.popitem()[1])

    def _tell(self, run: _Run) -> None:
        if len(run.times_ms) > run.told:
            run.told = len(run.times_ms)
            run.client.adopted(run.offer, run.step, round(median(run.times_ms), 3))


@dataclass
class _Run:
    """An offer that the training has run since a step."""

    client: ScheduleClient
    offer: Offer
    step: int
    warm: bool = False  # the first step after a swap is not measured
    times_ms: list[float] = field(default_factory=list)
    told: int = 0  # over how many steps the last median was

    def add(self, ms: float) -> None:
        if self.warm and len(self.times_ms) < MOST_STEPS:
            self.times_ms.append(ms)
        self.warm = True
