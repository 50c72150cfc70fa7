"""`Follower`: trains a pipeline by the schedules of a solver service, or of a search on rank 0's host, from the first
step on.

    with Pipeline(stages, placement, loss_fn, microbatches=8) as pipe, Follower(pipe, "http://solver:8000") as follow:
        for inputs, targets in batches:
            optimizer.zero_grad()
            report = follow.step(inputs, targets)
            optimizer.step()

It profiles, and at first runs one micro-batch at a time. Rank 0 follows the service: better schedules are swapped in as
they come, and no step waits for one. Without `activation_budget_bytes` the first step comes before the profile, so that
gradients and optimizer state are allocated when the profile counts what a GPU has left.

Every `every` steps the ranks gather what they have measured. Three of these steps are traced, far apart: a trace takes
host time, and three are the fewest whose median one slow step does not move. If times differ from the profile by more
than `threshold` twice in a row, those of the second gathering become the problem on all ranks, and the search goes on
with it. That takes at most 3 × `every` steps. The service gets a report of which schedules were swapped in, and how
long a step takes by each.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Unpack

from optpipe.anytime import ScheduleCache
from optpipe.errors import InputError
from optpipe.model.problem import Problem
from optpipe.options import SolveArguments
from optpipe.schedule import Schedule
from optpipe_runtime.execute.batch import Microbatches
from optpipe_runtime.execute.report import StepReport
from optpipe_runtime.lowering.prepare import one_at_a_time
from optpipe_runtime.measure.drift import TRACED, WINDOW, Profiler, drift, retimed
from optpipe_runtime.pipeline import Pipeline
from optpipe_runtime.service.client import ClientOptions, Offer, ScheduleClient
from optpipe_runtime.service.requests import api_key, service_url

log = logging.getLogger("optpipe.follow")

THRESHOLD = 0.2  # of a stage's F + B + W
MOST_STEPS = 1024  # that one median is over


class Follower(AbstractContextManager["Follower"]):
    """Trains a pipeline by the schedules of a service. Making one, `step` and `close` are collective. Raises
    `InputError` for an argument that cannot be right.

    Parameters
    ----------
    pipe
        The pipeline. If it has been profiled, it goes on from there, with the schedule that it has.
    url
        The address of the service; None: OPTPIPE_URL of the environment. Without that, or with a cache, the search runs
        on rank 0's host.
    activation_budget_bytes, offload_parts
        Passed to `Pipeline.profile`.
    every
        After how many steps the ranks gather what they have measured.
    threshold
        How far times may change, as a share of a stage's F + B + W, before they become the problem.
    key, cache, options
        Passed to `ScheduleClient`. `placements` is `keep`: a training keeps its stages.
    """

    def __init__(
        self,
        pipe: Pipeline,
        url: str | None = None,
        activation_budget_bytes: int | None = None,
        offload_parts: int = 1,
        every: int = WINDOW,
        threshold: float = THRESHOLD,
        key: str | None = None,
        cache: ScheduleCache | None = None,
        **options: Unpack[SolveArguments],
    ) -> None:
        if every < 1 or not threshold > 0:
            raise InputError(f"every = {every}, threshold = {threshold}: at least 1 step, and more than 0")
        api_key(key)  # raises here, not in the first step
        self._pipe, self._url, self._key, self._cache = pipe, service_url(url, cache), key, cache
        self._options = ClientOptions.from_arguments("Follower", options)
        if self._options.placements == "all":
            raise InputError("placements = 'all': a training keeps its stages, solve finds other ones before it begins")
        self._activation_budget_bytes, self._offload_parts = activation_budget_bytes, offload_parts
        self._every, self._threshold = every, threshold
        self._traced = frozenset(every * k // TRACED for k in range(TRACED))  # by number since the last gathering
        self._profiler = Profiler(pipe, len(self._traced))
        self._client: ScheduleClient | None = None  # on rank 0
        self._adoptions = Adoptions()
        self._problem: Problem | None = None  # the one that it follows
        self._steps: list[tuple[int, float]] = []  # version and ms, since the ranks last gathered
        self._count = 0
        self._suspected = False  # whether times had drifted when the ranks last gathered

    def step(
        self, inputs: Any = None, targets: Any = None, kwargs: Mapping[Any, Any] | None = None, outputs: bool = False
    ) -> StepReport:
        """`Pipeline.step`, by the best schedule known by now. Collective.

        Raises InputError for `Microbatches`: the service's schedules are for micro-batches that are alike in every
        step, and `PlannedSteps` makes one for every step here.
        """
        if isinstance(inputs, Microbatches) or isinstance(targets, Microbatches):
            raise InputError(
                "Follower.step was given Microbatches: a service's schedule is for all steps, PlannedSteps makes one "
                "for each"
            )
        self._begin(inputs, targets, kwargs)
        pipe, before = self._pipe, self._pipe.version
        if self._client and not pipe.preparing and (offer := self._client.poll()):
            pipe.offer(offer.schedule)
            self._adoptions.offered = self._client, offer
        tracing = len(self._steps) in self._traced
        report = pipe.step(inputs, targets, trace=tracing, kwargs=kwargs, outputs=outputs)
        if tracing:
            self._profiler.add(report)
        self._steps.append((report.version, report.step_ms))
        self._count += 1
        if report.version != before and pipe.schedule is not None:
            self._adoptions.swapped(report.version, pipe.schedule, self._count)
        if len(self._steps) == self._every:
            self._gather()
        return report

    @property
    def ended(self) -> bool:
        """On the rank with the client: whether the search is over. Steps after that may still swap its last schedule
        in."""
        return self._client is not None and self._client.ended

    # Before a step

    def _begin(self, inputs: Any, targets: Any, kwargs: Mapping[Any, Any] | None) -> None:
        """What the first steps need, and the caller has changed: profile, schedule, search for the problem."""
        pipe, running = self._pipe, self._pipe.schedule
        if pipe.problem is None and (running is not None or self._activation_budget_bytes is not None):
            problem = pipe.profile(inputs, targets, self._activation_budget_bytes, self._offload_parts, kwargs=kwargs)
            if running is not None:  # it is loaded again, as a schedule of the profiled problem
                pipe.load(Schedule(problem, running.programs, running.links, running.method))
        if pipe.schedule is None:
            pipe.load(one_at_a_time(pipe.problem or pipe.layout.unmeasured()))
        if pipe.problem is not None and pipe.problem is not self._problem:
            self._follow(pipe.problem)

    def _follow(self, problem: Problem) -> None:
        """Follows another problem: the first one, or one with new times or another number of micro-batches."""
        self._problem, self._suspected = problem, False
        self._profiler = Profiler(self._pipe, len(self._traced))
        self._adoptions.finish()
        if self._client is not None:
            self._client.update(problem, self._pipe.schedule)
        elif self._pipe.leads:
            self._client = ScheduleClient(
                self._url,
                problem,
                warm_start=self._pipe.schedule,
                key=self._key,
                cache=self._cache,
                **self._options.arguments(),
            )

    # After a step

    def _gather(self) -> None:
        """Collective: gathers what all ranks have measured since the last time."""
        by_rank = self._pipe.gather((self._steps, self._profiler.times))
        steps = zip(*(steps for steps, _ in by_rank), strict=True)
        self._adoptions.measured((ranks[0][0], max(ms for _, ms in ranks)) for ranks in steps)
        self._steps = []
        problem = self._pipe.problem
        if problem is None or self._pipe.preparing:  # an offer, which is checked on the problem as it is
            return
        # The same on every rank. The schedule that runs stays valid: only times of the problem change.
        measured = retimed(problem, [times for _, times in by_rank])
        far, before = drift(problem, measured), self._suspected
        self._suspected = far > self._threshold and not before
        if far <= self._threshold or not before:  # after two gatherings all these steps come after the change
            return
        self._pipe.problem = measured
        if self._pipe.leads:
            log.info(
                "step %d: times have drifted by up to %.0f %% of a stage's work, the search goes on with them",
                self._count,
                100 * far,
            )

    def close(self) -> None:
        """Gathers once more, and stops following the service. Collective."""
        if self._steps:
            self._gather()
        self._stop()

    def _stop(self) -> None:
        self._adoptions.finish()
        if self._client is not None:
            self._adoptions.log_if_none(self._count, self._client.why_none)
            self._client.close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:  # after a failure other ranks may not take part
            self.close()
        else:
            self._stop()


class Adoptions:
    """Reports to the service which of its schedules run, and how long a step takes by each.

    Used on the rank that has the client; on other ranks nothing is offered, so there is nothing to report. A median is
    reported whenever it is over twice as many steps as before, and when no more steps come.
    """

    def __init__(self) -> None:
        self.offered: tuple[ScheduleClient, Offer] | None = None  # the pipeline may swap it in or refuse it
        self._runs: dict[int, _Adoption] = {}  # by version of the pipeline's schedule
        self.count = 0  # of schedules that ran

    def swapped(self, version: int, running: Schedule, step: int) -> None:
        """From this step on another schedule runs: the offered one, or one that the pipeline went back to."""
        if self.offered is None:
            return
        client, offer = self.offered
        if (running.programs, running.links) == (offer.schedule.programs, offer.schedule.links):
            self.offered = None
            self._runs[version] = _Adoption(client, offer, step)
            self.count += 1
            client.adopted(offer, step)

    def measured(self, steps: Iterable[tuple[int, float]]) -> None:
        """Takes the times of further steps, each with the version of its schedule: ms of the slowest rank."""
        for version, ms in steps:
            if run := self._runs.get(version):
                run.add(ms)
        for version, run in list(self._runs.items()):
            if len(run.times_ms) >= 2 * run.reported:
                run.report()
            if version != max(self._runs):
                self._runs.pop(version).report()

    def log_if_none(self, steps: int, why: str) -> None:
        """Logs why no schedule ran; `why` holds if none was offered."""
        if not self.count:
            why = "the one that was offered was refused, or came too late" if self.offered else why
            log.info("no schedule was adopted in %d steps: %s", steps, why)

    def finish(self) -> None:
        """Reports what is left: times from now on are not comparable any more."""
        while self._runs:
            self._runs.popitem()[1].report()


@dataclass
class _Adoption:
    """An offer that the training has run since a step."""

    client: ScheduleClient
    offer: Offer
    step: int
    warm: bool = False  # the first step after a swap is not measured
    times_ms: list[float] = field(default_factory=list)
    reported: int = 0  # over how many steps the last median was

    def add(self, ms: float) -> None:
        if self.warm and len(self.times_ms) < MOST_STEPS:
            self.times_ms.append(ms)
        self.warm = True

    def report(self) -> None:
        if len(self.times_ms) > self.reported:
            self.reported = len(self.times_ms)
            self.client.adopted(self.offer, self.step, round(median(self.times_ms), 3))
