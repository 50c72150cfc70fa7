"""`StepRunner`: what all ranks of a pipeline do together: training steps, which are repeated until they count,
evaluations and profiles.

An `Attempt` at a step: **vote**; **meet**, if the ranks must; **run**, or leave it out; then it counts, or all ranks
**undo** it. No rank waits for the others between two steps. Their votes they send when they begin a step, and read when
they end it: then all have begun it, because a rank's last op needs ops of all others. So a vote decides about the step
that it was sent with, which may have to be undone, and about the one after. Only where a swap is due, or nothing can be
undone, do the ranks meet before a step. Inner peers agree before each whether to run it.

A step does not count if
- batch, modules or what is trained have changed on a rank. This rank lets the others finish theirs, with zeros of the
  old shapes; then the stages are learned again;
- the last update was not the right one (`post_validation`);
- it was on trial, as the first one by a schedule, and a rank ran out of memory. All ranks then go back to the schedule
  before.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from optpipe.errors import InputError, OptPipeError, ScheduleError
from optpipe_runtime.execute.batch import Batch, ChunkSpecs, require_weights
from optpipe_runtime.execute.executor import Executor
from optpipe_runtime.execute.learner import Learner
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.execute.report import StepReport
from optpipe_runtime.features.host_updates import HostUpdates
from optpipe_runtime.lowering.prepare import forwards_in_order
from optpipe_runtime.measure.measured import Measured
from optpipe_runtime.measure.profiler import Asked, profile, require_budget
from optpipe_runtime.pipeline.build import require_bytes
from optpipe_runtime.pipeline.post_validation import PostValidation
from optpipe_runtime.ranks.gradients import Tie
from optpipe_runtime.ranks.team import LostError
from optpipe_runtime.stage.state import save_random
from optpipe_runtime.swap.schedules import PlannedStep, Schedules

log = logging.getLogger("optpipe.runtime")

CLOSE_S = 5.0  # threads of a pipeline that has failed may wait for other ranks; after this time `close` leaves them


class Outcome(Enum):
    """How an attempt at a step has ended, on all ranks alike."""

    COUNTS = "it counts"
    CHANGED = "batch or modules have changed: it is undone, and the stages are learned again"
    CORRECTED = "the last update is corrected, so that parameters are gathered again"
    OUT_OF_MEMORY = "it was on trial, and a rank ran out of memory: it is undone, and another schedule runs"


class State(Enum):
    """What this rank has read of the votes for an attempt."""

    VOTED = "nothing: its own vote is on its way"
    MET = "all, before the step: no vote undoes it"
    GOES_ON = "all: none undoes it"
    UNDONE = "all: it is undone"


class StepRunner:
    """Every method is collective. The pipeline adds to `ties` and `validations`."""

    def __init__(self, rank: Rank, host_updates: HostUpdates, specs: ChunkSpecs) -> None:
        self.rank, self.host_updates, self._specs = rank, host_updates, specs
        self.learner, self.executor = Learner(rank, self.gather_all), Executor(rank)
        self.schedules = Schedules(rank, self.learner)
        self.ties: list[Tie] = []
        self.validations: list[PostValidation] = []
        rank.cpu_group.meet_peers()
        self._owes_gathering = False
        self._closed = False

    def batch(self, inputs: Any, targets: Any, kwargs: Mapping[Any, Any] | None, **asked: Any) -> Batch:
        """What a rank gives to a step. `asked`: other fields of `Batch`."""
        return Batch(inputs, targets, kwargs or {}, self._specs, **asked)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Wraps one call that all ranks make: if one fails, or has called another method, all fail."""
        if self._closed:
            raise InputError(f"{name} was called after close: this pipeline has ended, make a new one")
        with self.rank.team.collective():
            self.rank.cpu_group.enter(name)
            if name != "step":  # which votes itself
                self.rank.cpu_group.minimum()
                self._owes_gathering |= self.correct()
            yield

    def step(self, batch: Batch, plan: Callable[[], PlannedStep] | None = None) -> StepReport:
        """A step by the loaded schedule, or by one of its own, which `plan` waits for, the same on all ranks. It may
        use `profile_in_step`, and raise `InputError` or `ScheduleError` if there is no schedule."""
        self.schedules.planned = None
        for s in self.rank.layout.last & self.rank.stages.keys():  # collective over the replicas of these stages
            self.rank.stages[s].loss_factors = None
            if batch.weights is not None:
                require_weights(batch.weights, batch.count or self.rank.microbatches)
                self.rank.stages[s].loss_factors = self.rank.means.factors(s, batch.weights)
        # Windows of gradients are those of the schedule that runs for certain.
        is_certain = plan is None and self.learner.done and not self.schedules.swap_due
        self.rank.reductions.start_step(
            self.schedules.loaded if is_certain else None, plan is None and self.schedules.on_trial
        )
        if self._owes_gathering:
            # Corrected between two steps. A replica that does so only in the step gathers twice in it
            # (`Outcome.CORRECTED`): this empty gathering is the counterpart.
            self._owes_gathering = False
            with self.rank.replicas.gathering():
                pass
        try:
            report = self._until_it_counts(batch, plan)
        finally:
            self.schedules.planned = None
        if isinstance(report, OptPipeError):
            raise report
        for tie in self.ties:
            tie.end_step()
        norm = self.validations[-1].norm if self.validations else None
        return replace(report, version=self.schedules.version, grad_norm=norm)

    def evaluate(self, batch: Batch) -> StepReport:
        with self.learner.aside(), self.rank.replicas.gathering():
            if not self.rank.cpu_group.minimum(self.learner.is_current(batch, modes=False))[0]:
                self.executor.bytes.forget(self.learner.learn(batch, evaluating=True))
            plan, layout = self.schedules.loaded, self.rank.layout
            if self.learner.varies and (plan is None or plan.problem.microbatches != layout.microbatches):
                plan = forwards_in_order(self.rank.number, layout)
            with self.rank.team.local():
                report = self.executor.run(plan or self.schedules.plan, batch, evaluating=True)
        self.executor.bytes.forget(learned=False)
        return replace(report, version=self.schedules.version)

    def profile(self, batch: Batch, asked: Asked) -> Measured:
        """As `Pipeline.profile`."""
        with self.rank.replicas.gathering():
            measured = self.profile_in_step(batch, asked)
        self.schedules.problem = measured.problem
        return measured

    def profile_in_step(self, batch: Batch, asked: Asked) -> Measured:
        """The same before a planned step, for this replica alone. The step's schedules need not fit it."""
        rank, (activation_budget_bytes, parts, repeats, stack) = self.rank, asked
        rank.cpu_group.require_equal(offload_parts=parts, repeats=repeats, stack=stack)

        def require_arguments() -> None:
            if repeats < 1 or parts < 1:
                raise InputError(f"repeats = {repeats}, offload_parts = {parts}: both must be at least 1")
            if stack not in (None, "torch"):
                raise InputError(f"stack = {stack!r}: must be 'torch' or left out")
            require_bytes("activation_budget_bytes", activation_budget_bytes)
            if activation_budget_bytes is None:
                require_budget(rank)

        self.gather_all()
        if not rank.cpu_group.minimum(self.learner.is_current(batch))[0]:
            self.learn(batch)
        rank.cpu_group.on_each_rank(require_arguments)
        measured = profile(rank, self.learner, batch, asked)
        rank.replicas.forget()
        return measured

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True

        def end_threads() -> None:
            with ExitStack() as last_first:
                last_first.callback(self.rank.close)
                for validation in self.validations:
                    last_first.callback(validation.close)
                self.schedules.close()

        if self.rank.team.failure is None:
            end_threads()
        else:
            thread = threading.Thread(target=end_threads, name="optpipe-close", daemon=True)
            thread.start()
            thread.join(CLOSE_S)

    def synchronize(self) -> None:
        """As `Pipeline.synchronize`. Not collective."""
        self.host_updates.synchronize()
        for validation in self.validations:
            validation.settle()

    def gather_all(self) -> None:
        """Makes the parameters of all stages whole that have not been gathered, as they are after the last update."""
        self.synchronize()
        self.rank.replicas.gather_all()

    def correct(self) -> bool:
        """Corrects the last updates, if they were not the right ones. Returns whether one was not."""
        corrected = [validation.correct() for validation in self.validations]  # all, not only up to the first
        return any(corrected)

    def learn(self, batch: Batch) -> None:
        """Learns what passes between the stages, and reserves host memory for what it finds."""
        varied, is_change = self.learner.varies, self.learner.done
        learned = self.learner.learn(batch)
        self.executor.bytes.forget(learned)
        if is_change and learned and self.schedules.problem is not None and not (varied or self.learner.varies):
            log.warning(
                "the batch or the stages differ from the profiled ones: the time and memory that the "
                "schedule needs are not known"
            )
        if self.schedules.loaded is not None and self.schedules.planned is None:
            with self.rank.team.local():
                self.schedules.reserve(self.schedules.loaded)

    def _until_it_counts(self, batch: Batch, plan: Callable[[], PlannedStep] | None) -> StepReport | OptPipeError:
        """Repeats the step, in another gathering after an update was corrected. An error of `plan` is returned."""
        while True:
            with self.rank.replicas.gathering():
                if plan is not None and self.schedules.planned is None:
                    try:
                        planned = self.schedules.planned = plan()
                    except (InputError, ScheduleError) as error:
                        return error
                    self.executor.bytes.forget(self.learner.take(planned.shapes, batch))
                outcome = Outcome.CHANGED
                while outcome in (Outcome.CHANGED, Outcome.OUT_OF_MEMORY):
                    attempt = Attempt(self, batch)
                    outcome = attempt.run()
                if outcome is Outcome.COUNTS:
                    assert attempt.report is not None
                    self.rank.reductions.finish()
                    return attempt.report


class Attempt:
    def __init__(self, runner: StepRunner, batch: Batch) -> None:
        self._runner, self._rank, self._batch = runner, runner.rank, batch
        self._schedules = runner.schedules
        self._can_undo = not runner.host_updates.any
        # Inner peers leave a step out together, but one that stops within an op would leave the others in a collective
        # of the user's.
        self._can_stop = len(runner.rank.team.inner) == 1
        self.state = State.VOTED
        self._is_trial = False  # whether it is undone if a rank runs out of memory
        self.report: StepReport | None = None  # None if the step was left out here, or has failed
        self._restore: Callable[[], None] | None = None
        self._complaint = ""  # of a failure

    def run(self) -> Outcome:
        """Collective. Raises `InputError` if the step's schedule is for another number of micro-batches."""
        # Votes whether batch and modules are as they were, and what the schedules ask, and waits for nobody.
        as_before = self._runner.learner.is_current(self._batch)
        self._votes = self._rank.cpu_group.share(as_before, *self._schedules.votes())
        # That names this method to inner peers that are in another one. This waits for them:
        self._as_before = self._rank.cpu_group.peers_agree(as_before) if self._can_undo else as_before
        if self._must_meet():
            if not self._meet():
                return Outcome.CORRECTED
            self.state = State.MET
        m, scheduled = self._rank.layout.microbatches, self._schedules.plan.problem.microbatches
        if m != scheduled:
            raise InputError(
                f"this step has {m} micro-batches, and the schedule is for {scheduled}: load one for {m}, or let "
                "PlannedSteps make one for every step"
            )
        fixed = self._rank.reductions.in_windows  # what they have reduced is in the other replicas' gradients
        self._is_trial = self._schedules.on_trial and self._can_undo and self._can_stop and not fixed
        self._run()
        if self.must_undo():
            self._undo()
            if self._runner.correct():
                return Outcome.CORRECTED
            self._runner.learn(self._batch)
            return Outcome.CHANGED
        if self._is_trial and not self._rank.cpu_group.minimum(self.report is not None)[0]:
            self._undo()
            self._schedules.give_up(self._complaint)
            return Outcome.OUT_OF_MEMORY
        self._runner.correct()  # drops what was kept of an update that was right
        assert self.report is not None
        self._schedules.end_step(self.report.step_ms)
        return Outcome.COUNTS

    # Votes

    def _count(self) -> bool:
        """Waits until all ranks have begun the step, and counts their votes: whether nothing has changed."""
        as_before, *votes = self._votes.least(4)
        self._schedules.count(votes, same_batch=bool(as_before))
        return bool(as_before)

    def must_undo(self) -> bool:
        """Whether the step is to be undone. The first time it waits for the votes and for the norm of the last
        update, unless the ranks have met."""
        if self.state is State.VOTED:
            goes_on = self._count() and not any(validation.is_wrong() for validation in self._runner.validations)
            self.state = State.GOES_ON if goes_on else State.UNDONE
        return self.state is State.UNDONE

    def will_count(self) -> bool:
        """Whether it will count, whatever happens. Once a backward has begun, all ranks have begun the step, so their
        votes are here, and this waits for none of them."""
        return not self._is_trial and not self.must_undo()

    # Before the step

    def _must_meet(self) -> bool:
        """Whether all ranks read the votes before the step."""
        learner, schedules = self._runner.learner, self._schedules
        # By an update that was not the right one, a module may fail on one of the inner peers only.
        if not self._can_undo or (self._runner.validations and not self._can_stop):
            return True
        if schedules.planned is not None:
            return False
        return not learner.done or schedules.loaded is None or learner.varies or schedules.swap_due

    def _meet(self) -> bool:
        """All ranks: does what the votes ask for. Returns whether the step can begin: no update was corrected."""
        learner, schedules = self._runner.learner, self._schedules
        as_before = self._count()
        if self._runner.correct():
            return False
        if not as_before and learner.done:
            self._runner.learn(self._batch)
        if not self._rank.reductions.in_windows and schedules.planned is None:
            schedules.swap_if_due(self._batch)
        while not learner.done:  # at first, and after a swap to another number of micro-batches
            plan, complaint = schedules.plan, ""
            self._runner.executor.bytes.forget(learner.learn(self._batch))
            try:
                schedules.reserve(plan)
            except OptPipeError as error:  # too little host memory
                complaint = self._rank.team.describe(error)
            if not self._rank.cpu_group.minimum(not complaint)[0]:
                schedules.give_up(complaint)
        return True

    # The step

    def _run(self) -> None:
        """This rank's part of a step. Where there are gradients, it reads the votes first: copying them would cost
        more."""
        executor, plan = self._runner.executor, self._schedules.plan
        met = self.state is State.MET
        reads_first = met or any(p.grad is not None for s in self._rank.stages.values() for p in s.parameters())
        with self._rank.team.local():
            if not met and (not self._as_before or (reads_first and self.must_undo())):
                executor.skip(plan)
                return
            if self._is_trial or not reads_first:
                self._restore = snapshot(self._rank, self._batch)
            for tie in self._runner.ties:
                tie.start_step()
            try:
                self.report = executor.run(plan, self._batch, will_count=self.will_count)
            except LostError:
                raise
            except Exception as error:
                if not (self._is_trial and ran_out(error)) and not self._is_undone(reads_first):
                    raise
                executor.abandon()
                self._complaint = self._rank.team.describe(error)

    def _is_undone(self, reads_first: bool) -> bool:
        """Whether the failure of this rank's part matters to nobody."""
        try:
            return not reads_first and self._can_stop and self.must_undo()
        except OptPipeError:  # the ranks are lost to each other
            return False

    def _undo(self) -> None:
        if self._restore is not None:
            self._restore()
        self._rank.replicas.forget()


def snapshot(rank: Rank, batch: Batch) -> Callable[[], None]:
    """Saves what a step changes on this rank: gradients, what else forwards change in modules, a batch that stages
    change in place, and random numbers. Returns a function that restores it."""
    restores = [stage.replay.snapshot() for stage in rank.stages.values()]
    of_batch = [io for stage in rank.stages.values() for io in stage.io.values() if io.begins or io.ends]
    copies: list[tuple[Tensor, Tensor]] = []
    if any(io.changes_inputs for io in of_batch):
        copies = [(tensor, tensor.clone()) for tensor in batch.tensors()]
    restores.append(save_random(rank.device))

    def restore() -> None:
        for restore_part in restores:
            restore_part()
        for tensor, copy in copies:
            tensor.data.copy_(copy)

    return restore


def ran_out(error: BaseException) -> bool:
    """Whether the device, the host or the host pool had too little memory, and nothing else is wrong."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or type(error) is OptPipeError
