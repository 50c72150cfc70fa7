"""`PlannedSteps`: trains a pipeline with a schedule for every step.

    with Pipeline(stages, placement, loss_fn, microbatches=8) as pipe, PlannedSteps(pipe) as train:
        for inputs, targets in train.ahead(batches):  # each `Microbatches`
            optimizer.zero_grad()
            report = train.step(inputs, targets)
            optimizer.step()

Micro-batches larger than any before are profiled, at first three of different sizes. Each step has its own problem, by
what the steps before have taken, and its own schedule, which fits the memory of its own micro-batches. While a step
runs, the next one is planned, sent, checked and lowered beside it (`steps.ahead`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from torch import Tensor

from optpipe.errors import InputError
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe.steps import CostModel
from optpipe_runtime.execute.batch import Batch, BatchShapes
from optpipe_runtime.execute.report import StepReport
from optpipe_runtime.pipeline import Pipeline
from optpipe_runtime.stage.io import tensors_in
from optpipe_runtime.stage.levels import FULL
from optpipe_runtime.steps.ahead import PreparedStep, StepsAhead
from optpipe_runtime.steps.planner import (
    Features,
    MeasuredStep,
    StepAnnouncement,
    StepPlanner,
    Unmeasured,
    measured_step,
)
from optpipe_runtime.swap.schedules import PlannedStep

REPEATS = 3  # of each measurement of a profile


def tokens_and_squares(*inputs: Any, **kwargs: Any) -> dict[str, float]:
    """Of a micro-batch whose first tensor has rows of tokens: how many tokens, and the sum of squared lengths."""
    first: Tensor = tensors_in(inputs)[0]
    length = first.shape[1] if first.dim() > 1 else first.shape[0]
    tokens = float(first.shape[:2].numel())
    return {"tokens": tokens, "squares": tokens * length}


class PlannedSteps:
    """Trains a pipeline with a schedule for every step. Making one and its methods, but `problem`, are collective.

    Parameters
    ----------
    pipe
        The pipeline, with one route. Schedules that are loaded or offered do not count here.
    features
        What the times and bytes of a micro-batch follow from: a function of its inputs and named arguments, as the
        first stage gets them, that returns numbers by name, always the same names. By default the first tensor has rows
        of tokens, and times follow from their number and the sum of the rows' squared lengths; with several documents
        in a row give that of the documents' lengths. It is called on the rank of the first stage.
    activation_budget_bytes, offload_parts
        Passed to `Pipeline.profile`.
    costs
        The times learnt in an earlier training (`CostModel.load`), on the rank of the first stage. With them come the
        rules of its last step, from which the search for the first one starts.

    Raises
    ------
    InputError
        If the pipeline has several routes, or `whole_gradients`, or `costs` is of one with another number of stages.
    """

    def __init__(
        self,
        pipe: Pipeline,
        features: Callable[..., Mapping[str, float]] = tokens_and_squares,
        activation_budget_bytes: int | None = None,
        offload_parts: int = 1,
        costs: CostModel | None = None,
    ) -> None:
        rank, runner = pipe.runner.rank, pipe.runner
        if len(pipe.layout.routes) > 1:
            raise InputError(f"routes has {len(pipe.layout.routes)} entries: a schedule for every step needs one route")
        if set(rank.levels.values()) - {FULL}:
            raise InputError(
                f"recompute = {tuple(rank.levels)}: with a schedule for every step a pipeline recomputes by level "
                "'full' only"
            )
        if rank.reductions.whole is not None:
            raise InputError(
                f"whole_gradients = {rank.reductions.whole}: all replicas must run one schedule then, so a step cannot "
                "have its own: leave it out"
            )
        stages = len(pipe.layout.placement)

        def require_arguments() -> None:
            if costs is not None and costs.stages != stages:
                raise InputError(f"costs is of a pipeline of {costs.stages} stages: this one has {stages}")

        rank.cpu_group.on_each_rank(require_arguments)
        self._pipe, self._rank, self._runner = pipe, rank, runner
        self._features = features
        self._profile_arguments = activation_budget_bytes, offload_parts
        planner = pipe.layout.placement[pipe.layout.routes[0][0]]
        self._planner = StepPlanner(planner, costs) if rank.cpu_group.rank == planner else None
        self._ahead = StepsAhead(rank, planner)
        self._prepared: deque[tuple[StepAnnouncement, PreparedStep]] = deque()
        self._measured: list[MeasuredStep] = []  # not announced yet
        self._count = 0
        self.schedule: Schedule | None = None

    @property
    def costs(self) -> CostModel | None:
        """On the rank of the first stage, after its first step: what F, B and W take by the features, as learnt until
        now, and the rules of the last step. `save` keeps both in a file."""
        return None if self._planner is None else self._planner.times

    def problem(self, microbatches: Features) -> Problem:
        """On the rank of the first stage, after its first step: the problem of micro-batches with these features, by
        what is learnt until now, for `optpipe.steps.assign` and `pack`. Not collective.

        Raises InputError on other ranks, before the first step, and if a feature is missing.
        """
        if self._planner is None:
            raise InputError(
                f"problem was called on rank {self._rank.number}: rank {self._ahead.planner} has the costs"
            )
        return self._planner.problem(microbatches)

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
        """Announces the micro-batches of the step after those that were announced before, without waiting. Their
        tensors may still be filled, but keep their shapes."""
        batch, features = self._runner.batch(inputs, targets, kwargs), None
        try:
            shapes: BatchShapes | InputError = self._runner.learner.describe(batch)
            if self._planner is not None:
                features = self._features_of(batch)
        except InputError as error:
            shapes = error
        announcement = StepAnnouncement(self._count, shapes, features, tuple(self._measured))
        self._count, self._measured = self._count + 1, []
        self._prepared.append((announcement, self._prepare(announcement)))

    def _prepare(self, announcement: StepAnnouncement) -> PreparedStep:
        """Begins to prepare a step."""
        return self._ahead.prepare(announcement, None if self._planner is None else self._planner.plan)

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
        if not self._prepared:
            self.announce(inputs, targets, kwargs)
        announcement, prepared = self._prepared.popleft()
        batch = self._runner.batch(inputs, targets, kwargs, trace=trace, outputs=outputs, weights=weights, timed=True)
        with self._rank.team.collective():
            planned = prepared.wait()
        with self._rank.team.local():
            self._require_announced(announcement.shapes, batch)

        def plan() -> PlannedStep:
            nonlocal planned
            while isinstance(planned, Unmeasured):
                self._profile(batch, planned)
                planned = self._prepare(announcement._replace(measured=())).wait()
            return planned

        with self._runner.call("step"):
            report = self._runner.step(batch, plan)
        assert isinstance(planned, PlannedStep)
        self.schedule = planned.plan.schedule
        if self._planner is not None:
            self._planner.step_ms = report.step_ms
        self._measured.append(measured_step(announcement.number, report, planned.plan.problem, list(self._rank.stages)))
        return report

    def _require_announced(self, announced: BatchShapes | InputError, batch: Batch) -> None:
        """Raises `InputError` if the step has other micro-batches on this rank than its schedule is for."""
        shapes = self._runner.learner.describe(batch)
        assert isinstance(announced, BatchShapes)  # else there is no schedule
        if (shapes.microbatches, shapes.shapes) != (announced.microbatches, announced.shapes):
            raise InputError(
                "the micro-batches of this step are not those that were announced for it: give them to step in the "
                "order of announce, with the same shapes"
            )

    def _features_of(self, batch: Batch) -> Features:
        data, first = self._rank.cut(batch, batch.count or self._rank.microbatches), self._pipe.layout.routes[0][0]
        return [self._features(*values, **data.named(first, j)) for j, values in enumerate(data.inputs)]

    def _profile(self, batch: Batch, unmeasured: Unmeasured) -> None:
        """Profiles some micro-batches."""
        some = batch.only(*unmeasured)
        problem = self._runner.profile_in_step(some, *self._profile_arguments, REPEATS).problem
        if self._planner is not None:
            self._planner.add(problem, self._features_of(some))

    def close(self) -> None:
        """Ends the threads. Steps that were announced and not run are dropped."""
        self._ahead.close()

    def __enter__(self) -> PlannedSteps:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
