"""`StepPlanner`: plans the steps to come, on one rank of a pipeline."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe.steps import CostModel, StepRules, StepScheduler
from optpipe_runtime.service.connection import service_url
from optpipe_runtime.service.stream import StreamClient
from optpipe_runtime.steps.ahead import StepAnnouncement, Unmeasured
from optpipe_runtime.steps.costs import Features, StepCosts

IMPROVE_SHARE = 0.33  # of a step's time, until the next one's schedule is sent: more gains little


class StepPlanner:
    """Costs, as learnt from steps and profiles; the rules of the step before, or of a service's stream.

    Parameters
    ----------
    rank
        On which it is, by its number in the pipeline.
    costs, url, key
        As of `PlannedSteps`.

    Attributes
    ----------
    stream
        The service's, if there is one, from the first planned step on.
    """

    def __init__(self, rank: int, costs: CostModel | None, url: str | None, key: str | None) -> None:
        self._rank, self._url, self._key = rank, service_url(url), key
        self._costs = StepCosts(costs)
        self._lock = threading.Lock()  # of the costs: a step is planned while another one's micro-batches are profiled
        self._before: StepRules | None = None  # of the step that was planned last
        self.stream: StreamClient | None = None
        self._step_s = 0.0  # the last one took

    @property
    def times(self) -> CostModel | None:
        """What F, B and W take; None until a first profile."""
        return self._costs.times

    def problem(self, microbatches: Features) -> Problem:
        with self._lock:
            return self._costs.problem(microbatches)

    def plan(self, by_rank: Sequence[StepAnnouncement], begins: threading.Event) -> Schedule | Unmeasured:
        """In a thread beside the step before: from all ranks' announcements of a step, its schedule. Looks for better
        ones until the step `begins`, or a part of its time has passed."""
        costs, announcement, began = self._costs, by_rank[self._rank], time.monotonic()
        assert announcement.features is not None
        with self._lock:
            costs.learn([each.measured for each in by_rank])
            if chosen := costs.unmeasured(announcement.features):
                return Unmeasured(chosen, len(announcement.features))
            assert costs.template is not None
            costs.await_times(announcement.number, announcement.features)
            template, problem = costs.template, costs.problem(announcement.features)
        if self._url is not None and self.stream is None:
            self.stream = StreamClient(self._url, problem, self._key)
        starts = [rules for rules in (self._before, self.stream and self.stream.rules) if rules]
        planned = StepScheduler(template).plan(problem, starts=starts)
        begins.wait(max(0.0, began + IMPROVE_SHARE * self._step_s - time.monotonic()))
        best = planned.best()
        if best.rules is not None:
            self._before = StepRules(best.rules, problem)
        return best

    def add(self, profiled: Problem, features: Features) -> None:
        """A profile of micro-batches with these features."""
        is_first = self._costs.template is None
        with self._lock:
            self._costs.add(profiled, features)
        if is_first and self._costs.template is not None:
            StepScheduler(self._costs.template).prepare()

    def ran(self, number: int, schedule: Schedule, step_ms: float) -> None:
        """A step has run."""
        self._step_s = step_ms / 1e3
        if self.stream is not None:
            self.stream.ran(number, schedule, step_ms)

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()
