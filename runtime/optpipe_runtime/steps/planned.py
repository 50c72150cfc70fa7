"""`PlannedSteps`: trains a pipeline with a schedule for every step.

    with Pipeline(stages, placement, loss_fn, microbatches=8) as pipe, PlannedSteps(pipe) as train:
        for inputs, targets in train.ahead(batches):  # each `Microbatches`
            optimizer.zero_grad()
            report = train.step(inputs, targets)
            optimizer.step()

Before the first step some of its micro-batches are profiled. From then on each step has its own problem, by what the
steps before have taken, and its own schedule, which fits the memory of its own micro-batches. While a step runs, the
next one is planned, sent, checked and lowered beside it (`steps.ahead`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from torch import Tensor

from optpipe.errors import InputError
from optpipe.schedule import Schedule
from optpipe.steps import CostModel, StepScheduler
from optpipe_runtime.execute.batch import Batch
from optpipe_runtime.execute.report import StepReport
from optpipe_runtime.pipeline import Pipeline
from optpipe_runtime.stage.io import tensors_in
from optpipe_runtime.steps.ahead import Ahead, PreparedStep, Told
from optpipe_runtime.steps.costs import Features, Seen, StepCosts, seen

PROFILED = 3  # forms: as many as a time has coefficients, by tokens, by squares of lengths, and once
IMPROVE_SHARE = 0.5  # of a step's time, until the next one's schedule is sent


def tokens_and_squares(*inputs: Any) -> dict[str, float]:
    """Of a micro-batch whose first tensor has rows of tokens: how many tokens, and the sum of squared lengths."""
    first: Tensor = tensors_in(inputs)[0]
    length = first.shape[1] if first.dim() > 1 else first.shape[0]
    tokens = float(first.shape[:2].numel())
    return {"tokens": tokens, "squares": tokens * length}


class PlannedSteps:
    """Trains a pipeline with a schedule for every step. Making one and all its methods are collective.

    Parameters
    ----------
    pipe
        The pipeline, with one route. Schedules that are loaded or offered do not count here.
    features
        What the times and bytes of a micro-batch follow from: a function of its inputs, as the first stage gets them,
        that returns numbers by name, always the same names. By default the first tensor has rows of tokens, and times
        follow from their number and the sum of the rows' squared lengths; with several documents in a row give that of
        the documents' lengths. It is called on the rank of the first stage.
    activation_budget_bytes, offload_parts
        Passed to `Pipeline.profile`.
    costs
        The times learnt in an earlier training (`CostModel.load`), on the rank of the first stage.

    Raises
    ------
    InputError
        If the pipeline has several routes.
    """

    def __init__(
        self,
        pipe: Pipeline,
        features: Callable[..., Mapping[str, float]] = tokens_and_squares,
        activation_budget_bytes: int | None = None,
        offload_parts: int = 1,
        costs: CostModel | None = None,
    ) -> None:
        rank, runner = pipe._rank, pipe._step_runner
        if len(pipe.layout.routes) > 1:
            raise InputError(f"routes has {len(pipe.layout.routes)} entries: a schedule for every step needs one route")
        self._pipe, self._rank, self._runner = pipe, rank, runner
        self._features, self._times = features, costs
        self._profile_arguments = activation_budget_bytes, offload_parts
        self._planner = pipe.layout.placement[pipe.layout.routes[0][0]]
        self._plans = rank.cpu_group.rank == self._planner
        self._ahead = Ahead(rank, self._planner)
        self._costs: StepCosts | None = None  # on the rank that plans, once it has profiled
        self._profiled = False
        self._announced: deque[Batch] = deque()  # before the profile
        self._prepared: deque[PreparedStep] = deque()
        self._seen: list[Seen] = []  # not told yet
        self._count, self._step_s = 0, 0.0
        self.schedule: Schedule | None = None

    @property
    def costs(self) -> CostModel | None:
        """On the rank of the first stage, after its first step: what F, B and W take by the features, as learnt until
        now. `save` keeps it in a file."""
        return None if self._costs is None else self._costs.times

    def ahead(self, batches: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
        """Yields the batches, one after the other, and announces each one step before it is to run.

        Parameters
        ----------
        batches
            For each step the first arguments of `step`: inputs, targets, and named arguments if there are some. All
            ranks have equally many; a rank that takes no inputs or targets may have None in their places.
        """
        waiting: deque[Sequence[Any]] = deque()
        for batch in batches:
            self.announce(*batch)
            waiting.append(batch)
            if len(waiting) > 1:
                yield waiting.popleft()
        yield from waiting

    def announce(self, inputs: Any = None, targets: Any = None, kwargs: Mapping[Any, Any] | None = None) -> None:
        """Tells the micro-batches of the step after those that were announced before, without waiting. Their tensors
        may still be filled, but keep their shapes."""
        batch = self._pipe._batch(inputs, targets, kwargs)
        if self._profiled:
            self._prepare(batch)
        else:
            self._announced.append(batch)

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        kwargs: Mapping[Any, Any] | None = None,
        outputs: bool = False,
        weights: Sequence[float] | None = None,
        trace: bool = False,
    ) -> StepReport:
        """`Pipeline.step` with a schedule of its own. If the step was not announced, it waits until that is made.

        Raises
        ------
        StepMemoryError
            Before the step, if a micro-batch does not fit by itself; it names the micro-batch.
        ScheduleError
            If no schedule is found for another reason.
        """
        if not (self._announced or self._prepared):
            self.announce(inputs, targets, kwargs)
        if not self._profiled:
            self._profile(self._announced[0])
            while self._announced:
                self._prepare(self._announced.popleft())
        planned = self._prepared.popleft().wait()
        batch = self._pipe._batch(inputs, targets, kwargs, trace, outputs, weights, timed=True)
        with self._pipe._calls.wrap("step"):
            report = self._runner.step(batch, planned)
        self.schedule, self._step_s = planned.plan.schedule, report.step_ms / 1e3
        number = self._count - len(self._prepared) - 1
        self._seen.append(seen(number, report, planned.plan.problem, list(self._rank.stages)))
        return report

    def _prepare(self, batch: Batch) -> None:
        """Begins to prepare the step with this batch."""
        given: Any
        features = None
        try:
            given = self._runner.describe(batch)
            if self._plans:
                features = self._features_of(batch)
        except InputError as error:
            given = error
        told = Told(self._count, given, features, tuple(self._seen))
        self._count += 1
        self._seen = []
        self._prepared.append(self._ahead.prepare(told, self._plan if self._plans else None))

    def _features_of(self, batch: Batch) -> Features:
        return [self._features(*values) for values in batch.cut_inputs(batch.count or self._rank.microbatches)]

    def _plan(self, by_rank: Sequence[Told], begins: threading.Event) -> Schedule:
        """In the thread of the rank that plans."""
        costs, told = self._costs, by_rank[self._planner]
        assert costs is not None
        assert told.features is not None
        costs.learn([each.seen for each in by_rank])
        planned = StepScheduler(costs.template).plan(costs.problem(told.number, told.features))
        begins.wait(IMPROVE_SHARE * self._step_s)
        return planned.best()

    def _profile(self, batch: Batch) -> None:
        """Profiles the smallest of the first step's micro-batches, the largest, and one between."""
        budget, parts = self._profile_arguments
        with self._pipe._calls.wrap("profile"):
            chosen, m = self._runner.choose_forms(batch, PROFILED)
            some = batch.only(chosen, m)
            problem = self._runner.profile(some, budget, parts, repeats=3).problem
        if self._plans:
            self._costs = StepCosts(problem, self._features_of(some), self._times)
            StepScheduler(self._costs.template).prepare()
        self._profiled = True

    def close(self) -> None:
        """Ends the thread. Steps that were announced and not run are dropped."""
        self._ahead.close()

    def __enter__(self) -> PlannedSteps:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
