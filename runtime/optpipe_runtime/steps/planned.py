"""`PlannedSteps`: trains a pipeline with a schedule for every step.

    with Pipeline(stages, placement, loss_fn, microbatches=8) as pipe, PlannedSteps(pipe) as train:
        for inputs, targets in train.ahead(batches):  # each `Microbatches`
            optimizer.zero_grad()
            report = train.step(inputs, targets)
            optimizer.step()

Micro-batches larger than any before are profiled, at first three of different sizes. Each step has its own problem, by
what the steps before have taken, and its own schedule, which fits the memory of its own micro-batches.

The ranks prepare a step while the one before runs, in a thread of each that no step waits for. They gather which
micro-batches the step has and what the last ones took. The rank of the first stage, without which none can begin a
step, plans it, and sends problem and schedule to all. Each checks the schedule on this problem and lowers it; if all
could, it will run, else each micro-batch alone, one after the other.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from math import ceil
from typing import Any, NamedTuple

from torch import Tensor

from optpipe.errors import InputError, OptPipeError
from optpipe.model.problem import Problem
from optpipe.model.records import of_microbatch
from optpipe.schedule import Schedule
from optpipe.steps import CostModel
from optpipe_runtime.execute.batch import Batch, BatchShapes
from optpipe_runtime.execute.report import StepReport
from optpipe_runtime.lowering.plan import Plan
from optpipe_runtime.lowering.prepare import lower, one_at_a_time, require_valid
from optpipe_runtime.measure.profiler import Asked
from optpipe_runtime.memory.engines import ThreadEngine
from optpipe_runtime.pipeline import Pipeline
from optpipe_runtime.ranks.cpu_group import CpuGroup
from optpipe_runtime.ranks.team import LostError
from optpipe_runtime.stage.io import tensors_in
from optpipe_runtime.stage.levels import FULL
from optpipe_runtime.steps.planner import (
    Features,
    MeasuredStep,
    StepAnnouncement,
    StepPlanner,
    Unmeasured,
    measured_step,
)
from optpipe_runtime.swap.schedules import PlannedStep, share_schedule

log = logging.getLogger("optpipe.runtime")

REPEATS = 3  # of each measurement of a profile


def tokens_and_squares(*inputs: Any, **kwargs: Any) -> dict[str, float]:
    """Of a micro-batch whose first tensor has rows of tokens: how many tokens, and the sum of squared lengths."""
    first: Tensor = tensors_in(inputs)[0]
    length = first.shape[1] if first.dim() > 1 else first.shape[0]
    tokens = float(first.shape[:2].numel())
    return {"tokens": tokens, "squares": tokens * length}


class PreparedStep(NamedTuple):
    announcement: StepAnnouncement
    begins: threading.Event  # until it is set, the planner may look for a better schedule
    planned: Future[PlannedStep | Unmeasured]

    def wait(self) -> PlannedStep | Unmeasured:
        """When the step is to begin. Raises what went wrong."""
        self.begins.set()
        return self.planned.result()


class PlannedSteps(AbstractContextManager["PlannedSteps"]):
    """Trains a pipeline with a schedule for every step. Making one and its methods, but `problem`, are collective.
    Raises `InputError` if the pipeline has several routes or `whole_gradients`, or `costs` has other stages.

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
        self._profile = Asked(activation_budget_bytes, offload_parts, REPEATS)
        self._first = pipe.layout.placement[pipe.layout.routes[0][0]]  # the rank that plans
        self._planner = StepPlanner(self._first, costs) if rank.cpu_group.rank == self._first else None
        self._group, self._thread = CpuGroup(rank.team), ThreadEngine()  # to prepare steps
        self._prepared: deque[PreparedStep] = deque()
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
            raise InputError(f"problem was called on rank {self._rank.number}: rank {self._first} has the costs")
        return self._planner.problem(microbatches)

    def ahead(self, batches: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
        """Yields the batches, one after the other, and announces each one step before it is to run.

        A batch has the first arguments of `step`: inputs, targets, and named arguments if there are some. All ranks
        have equally many; a rank that takes no inputs or targets may have None in their places.
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
        self._prepared.append(self._begin_to_prepare(announcement))

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

        Raises, before the step, `StepMemoryError` if a micro-batch, which it names, does not fit by itself, and
        `ScheduleError` if no schedule is found for another reason.
        """
        if not self._prepared:
            self.announce(inputs, targets, kwargs)
        prepared = self._prepared.popleft()
        announcement = prepared.announcement
        batch = self._runner.batch(inputs, targets, kwargs, trace=trace, outputs=outputs, weights=weights, timed=True)
        with self._rank.team.collective():
            planned = prepared.wait()
        with self._rank.team.local():
            shapes, announced = self._runner.learner.describe(batch), announcement.shapes
            assert isinstance(announced, BatchShapes)  # else there is no schedule
            if (shapes.microbatches, shapes.shapes) != (announced.microbatches, announced.shapes):
                raise InputError(
                    "the micro-batches of this step are not those that were announced for it: give them to step in the "
                    "order of announce, with the same shapes"
                )

        def plan() -> PlannedStep:
            nonlocal planned
            while isinstance(planned, Unmeasured):
                some = batch.only(*planned)
                problem = self._runner.profile_in_step(some, self._profile).problem
                if self._planner is not None:
                    self._planner.add(problem, self._features_of(some))
                planned = self._begin_to_prepare(announcement._replace(measured=())).wait()
            return planned

        with self._runner.call("step"):
            report = self._runner.step(batch, plan)
        assert isinstance(planned, PlannedStep)
        self.schedule = planned.plan.schedule
        if self._planner is not None:
            self._planner.step_ms = report.step_ms
        self._measured.append(measured_step(announcement.number, report, planned.plan.problem, list(self._rank.stages)))
        return report

    def _features_of(self, batch: Batch) -> Features:
        data, first = self._rank.cut(batch, batch.count or self._rank.microbatches), self._pipe.layout.routes[0][0]
        return [self._features(*values, **data.named(first, j)) for j, values in enumerate(data.inputs)]

    # Beside the step before

    def _begin_to_prepare(self, announcement: StepAnnouncement) -> PreparedStep:
        """Begins to prepare a step, without waiting. Collective; steps are prepared in the order of the calls."""
        step = PreparedStep(announcement, threading.Event(), Future())

        def prepare() -> None:
            try:
                step.planned.set_result(self._prepare(announcement, step.begins))
            except BaseException as error:
                step.planned.set_exception(error)

        self._thread.run(prepare)
        return step

    def _prepare(self, announcement: StepAnnouncement, begins: threading.Event) -> PlannedStep | Unmeasured:
        by_rank: list[StepAnnouncement] = self._group.gather(announcement)
        numbers = [each.number for each in by_rank]
        if len(set(numbers)) > 1:
            fewest, most = (pick(range(len(numbers)), key=numbers.__getitem__) for pick in (min, max))
            raise InputError(
                f"rank {self._rank.cpu_group.name_of(most)} announces step {numbers[most] + 1} and rank "
                f"{self._rank.cpu_group.name_of(fewest)} step {numbers[fewest] + 1}: all ranks must have equally many "
                "batches"
            )
        for each in by_rank:
            if isinstance(each.shapes, InputError):
                raise each.shapes
        planner = self._planner
        schedule = share_schedule(self._group, self._first, lambda: planner and planner.plan(by_rank, begins))
        if isinstance(schedule, Unmeasured):
            return schedule
        one_by_one = partial(self._lowered, one_at_a_time(schedule.problem))
        lowered = self._lowered(schedule)
        if not self._group.all_equal(None if lowered is None else lowered.number):
            lowered = one_by_one()
            if not self._group.all_equal(None if lowered is None else lowered.number):
                raise OptPipeError("the ranks can run neither the schedule of this step nor one micro-batch at a time")
        assert lowered is not None
        return PlannedStep(lowered, [each.shapes for each in by_rank], one_by_one)

    def _lowered(self, schedule: Schedule) -> Plan | None:
        """This rank's plan, checked; None if it cannot run it."""
        rank, problem = self._rank, schedule.problem
        layout = rank.whole_layout.with_microbatches(problem.microbatches)

        def part_bytes(s: int, j: int, _: int) -> int:
            stage = problem.stages[s]
            return rank.pool.size(ceil(of_microbatch(stage.activation_bytes, j) / stage.offload_parts))

        try:
            require_valid(schedule, layout, problem, rank.require)
            plan = lower(schedule, rank.number, layout, problem)
            rank.pool.reserve(plan.host_peak(part_bytes))
        except LostError:
            raise
        except OptPipeError as error:
            log.warning("rank %s cannot run the schedule of the next step: %s", rank.team.name, error)
            return None
        return plan

    def close(self) -> None:
        """Ends the threads. Steps that were announced and not run are dropped."""
        if self._rank.team.failure is None:
            self._thread.close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
