"""`StepRunner`: training steps, evaluations and profiles of one rank, with what comes before and after them: learning
the stages, swapping schedules, replicas, ties, and repeating a step that must not count.

No rank waits for the others between two steps. Their votes they send when they begin a step, and read when they end it:
then all have begun it, because a rank's last op needs ops of all others. So a vote decides about the step that it was
sent with, which may have to be undone, and about the one after. Only where a swap is due, or nothing can be undone, do
the ranks meet before a step. Inner peers agree before each whether to run it.

The life of a step (`_attempt`): **vote**; **meet**, if the ranks must; **run**, or leave it out; then it counts, or all
ranks **undo** it and **repeat** it. It does not count if
- batch, modules or what is trained have changed on a rank. This rank lets the others finish theirs, with zeros of the
  old shapes; then the stages are learned again;
- a feature was wrong about what it did before the step, and corrects it (`Feature.is_wrong`);
- it was the first one by a schedule, and a rank ran out of memory. All ranks then go back to the schedule before. Of
  steps with schedules of their own, this is so for one that may hold more bytes than all before; it runs again with one
  micro-batch at a time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from optpipe.errors import InputError, OptPipeError, ScheduleError
from optpipe_runtime.arguments import require_bytes, require_equal
from optpipe_runtime.execute.batch import Batch, require_weights
from optpipe_runtime.execute.executor import Executor
from optpipe_runtime.execute.handler import Feature
from optpipe_runtime.execute.learner import Learner
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.execute.report import StepReport
from optpipe_runtime.lowering.plan import Plan
from optpipe_runtime.lowering.prepare import forwards_in_order
from optpipe_runtime.measure.budget import require_budget
from optpipe_runtime.measure.measured import Measured
from optpipe_runtime.measure.profiler import profile
from optpipe_runtime.ranks.cpu_group import Shared
from optpipe_runtime.ranks.subgroup import LostError
from optpipe_runtime.ranks.ties import Tie
from optpipe_runtime.swap.schedules import Schedules
from optpipe_runtime.swap.trials import PlannedStep, PlannedTrials, ran_out, snapshot

log = logging.getLogger("optpipe.runtime")

CLOSE_S = 5.0  # threads of a pipeline that has failed may wait for other ranks; after this time `close` leaves them


class Repeat(Enum):
    """Why a step runs again."""

    AS_IT_IS = "it was undone"
    WITH_CORRECTED_PARAMETERS = "parameters were corrected, so that they are gathered again"


class StepRunner:
    """Every method is collective."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._replicas, self._features = rank, rank.replicas, rank.features
        self.learner, self.executor = Learner(rank, self.gather_all), Executor(rank)
        self.schedules = Schedules(rank, self.learner, self.executor)
        self.ties: list[Tie] = []
        self._can_undo = not any(feature.irreversible for feature in rank.features)
        # Inner peers leave a step out together, but one that stops within an op would leave the others in a collective
        # of the user's.
        self._can_stop = len(rank.team.inner) == 1
        rank.cpu_group.meet_peers()
        self._last_ms, self._last_version = 0.0, 0  # of the last step here, until the others are told
        self._gathers_again = False
        self._planned: PlannedStep | None = None  # this step, if it is one
        self._trials = PlannedTrials(rank.cpu_group)

    def step(self, batch: Batch, plan: Callable[[], PlannedStep] | None = None) -> StepReport:
        """A step by the loaded schedule, or by one of its own, which `plan` waits for, the same on all ranks. It may
        use `profile_in_step`, and raise `InputError` or `ScheduleError` if there is no schedule."""
        self._planned = self.schedules.plan_of_step = None
        self._rank.reductions.start_step()
        self._weigh(batch)
        self._agree(may_know=plan is None)
        if self._gathers_again:
            # `settle` has corrected here before the step. Another replica may do so only in it, by one more gathering;
            # this empty one is its counterpart.
            with self._replicas.gathering():
                self._gathers_again = False
        try:
            report = self._until_it_counts(batch, plan)
        finally:
            self._planned = self.schedules.plan_of_step = None
        if isinstance(report, OptPipeError):
            raise report
        self._rank.team.steps += 1
        for tie in self.ties:
            tie.end_step()
        self._last_ms = report.step_ms if plan is None else 0.0  # the next step has another schedule
        self._last_version = self.schedules.running.version
        fields = {name: value for feature in self._features for name, value in feature.report_fields().items()}
        return replace(report, version=self._last_version, **fields)

    def evaluate(self, batch: Batch) -> StepReport:
        with self.learner.aside(), self._replicas.gathering():
            if not self._rank.cpu_group.minimum(self.learner.knows_batch(batch))[0]:
                self.executor.forget_sizes(self.learner.learn(batch, evaluating=True))
            plan = self._plan_of_evaluation()
            with self._rank.team.local():
                report = self.executor.run(plan, batch, evaluating=True)
        self.executor.forget_sizes(learned=False)
        return replace(report, version=self.schedules.running.version)

    def settle(self) -> None:
        """Between two steps: corrects what features did after the last step, if it was wrong."""
        self._gathers_again |= self._correct()

    def profile(self, batch: Batch, activation_budget_bytes: int | None, parts: int, repeats: int) -> Measured:
        """As `Pipeline.profile`."""
        with self._replicas.gathering():
            measured = self.profile_in_step(batch, activation_budget_bytes, parts, repeats)
        self.schedules.problem = measured.problem
        return measured

    def profile_in_step(self, batch: Batch, activation_budget_bytes: int | None, parts: int, repeats: int) -> Measured:
        """The same before a planned step, so that other replicas need not do it, too. The step's schedules need not fit
        this problem."""
        if not self.executor.idle:
            raise OptPipeError("a pipeline is profiled only between two steps")
        rank = self._rank
        require_equal(rank.cpu_group, offload_parts=parts, repeats=repeats)

        def require_arguments() -> None:
            if repeats < 1 or parts < 1:
                raise InputError(f"repeats = {repeats}, offload_parts = {parts}: both must be at least 1")
            require_bytes("activation_budget_bytes", activation_budget_bytes)
            if activation_budget_bytes is None:
                require_budget(rank)

        self.gather_all()
        if not rank.cpu_group.minimum(self.learner.knows(batch))[0]:
            self.learn(batch)
        rank.cpu_group.on_each_rank(require_arguments)
        measured = profile(rank, self.learner, batch, activation_budget_bytes, parts, repeats)
        self._replicas.forget()
        return measured

    def close(self) -> None:
        """Ends the threads of the pipeline."""
        if self._rank.team.failure is None:
            self._end_threads()
        else:
            thread = threading.Thread(target=self._end_threads, name="optpipe-close", daemon=True)
            thread.start()
            thread.join(CLOSE_S)

    def _end_threads(self) -> None:
        self.schedules.offers.close()
        self._rank.close()

    # Learning

    def learn(self, batch: Batch) -> None:
        """Learns what passes between the stages, and reserves host memory for what it finds."""
        varied, known = self.learner.varies, self.learner.done
        learned = self._learn(batch)
        if known and learned and self.schedules.problem is not None and not (varied or self.learner.varies):
            log.warning(
                "the batch or the stages differ from the profiled ones: the time and memory that the "
                "schedule needs are not known"
            )
        if self.schedules.running.plan is not None and self._planned is None:
            with self._rank.team.local():
                self.schedules.reserve(self.schedules.running.plan)

    def gather_all(self) -> None:
        """Makes the parameters of all stages whole that have not been gathered, as they are after the last update."""
        for feature in self._features:
            feature.synchronize()
        self._replicas.gather_all()

    def _learn(self, batch: Batch) -> bool:
        learned = self.learner.learn(batch)
        self.executor.forget_sizes(learned)
        return learned

    def _learn_first(self, batch: Batch) -> None:
        """If nothing was learned yet, or for another number of micro-batches."""
        while not self.learner.done:
            plan, complaint = self.schedules.plan, ""
            self._learn(batch)
            try:
                self.schedules.reserve(plan)
            except OptPipeError as error:  # too little host memory
                complaint = self._rank.team.describe(error)
            if not self._rank.cpu_group.minimum(not complaint)[0]:
                self._swap_back(complaint)

    # The life of a step

    def _agree(self, may_know: bool) -> None:
        """Before the first vote: what features agree on if the schedule cannot change in this step."""
        running = self.schedules.running
        is_sure = may_know and self.learner.done and not self.schedules.swap_due
        for feature in self._features:
            feature.agree_on_step(running.plan if is_sure else None, may_know and running.on_trial)

    def _weigh(self, batch: Batch) -> None:
        """Tells the stages where routes end how much each loss counts. Collective over their replicas."""
        for s in self._rank.layout.last & self._rank.stages.keys():
            stage = self._rank.stages[s]
            stage.loss_factors = None
            if batch.weights is not None:
                require_weights(batch.weights, batch.count or self._rank.microbatches)
                stage.loss_factors = self._rank.means.factors(s, batch.weights)

    def _until_it_counts(self, batch: Batch, plan: Callable[[], PlannedStep] | None) -> StepReport | OptPipeError:
        while True:
            with self._replicas.gathering():
                if plan is not None and self._planned is None:
                    try:
                        self._planned = plan()
                    except (InputError, ScheduleError) as error:
                        return error
                    self.schedules.plan_of_step = self._planned.plan
                    self.executor.forget_sizes(self.learner.take(self._planned.given, batch))
                while (result := self._attempt(batch)) is Repeat.AS_IT_IS:
                    pass
                if isinstance(result, StepReport):
                    self._rank.reductions.finish()
                    return result

    def _attempt(self, batch: Batch) -> StepReport | Repeat:
        """One life of the step."""
        attempt = self._vote(batch)
        attempt.met = self._must_meet()
        if attempt.met and self._meet(attempt.all_know, batch):
            return Repeat.WITH_CORRECTED_PARAMETERS
        self._require_count()
        running, planned = self.schedules.running, self._planned
        is_new = running.on_trial if planned is None else self._trials.is_due(planned.plan)
        attempt.is_trial = is_new and self._can_undo and self._can_stop and not self._is_fixed
        outcome = self._run(attempt, batch)
        if attempt.is_doomed:
            self._undo(outcome)
            if self._correct():
                return Repeat.WITH_CORRECTED_PARAMETERS
            self.learn(batch)
            return Repeat.AS_IT_IS
        if attempt.is_trial and not self._rank.cpu_group.minimum(outcome.report is not None)[0]:
            self._undo(outcome)
            if planned is None:
                self._swap_back(outcome.complaint)
            else:
                self._trials.give_up(planned, outcome.complaint)
                self.schedules.plan_of_step = planned.plan
            return Repeat.AS_IT_IS
        self._correct()  # drops what was kept of an update that was right
        if planned is None:
            running.end_step()
        else:
            self._trials.end_step(planned.plan)
        assert outcome.report is not None
        return outcome.report

    def _vote(self, batch: Batch) -> _Attempt:
        """Tells the others what they must know of this rank, without waiting."""
        is_known = self.learner.knows(batch)
        microseconds = round(1e3 * self._last_ms) if self._last_version == self.schedules.running.version else 0
        self._last_ms = 0.0
        shared = self._rank.cpu_group.share(is_known, *self.schedules.offers.votes(), -microseconds)
        # `share` comes first: it waits for nobody, and tells inner peers that are in another method, before
        # `peers_agree` waits for them.
        is_known = self._rank.cpu_group.peers_agree(is_known) if self._can_undo else is_known
        return _Attempt(is_known, shared, self.schedules.heard, self._features)

    def _must_meet(self) -> bool:
        """Whether all ranks read the votes before the step."""
        # By an update that was not the right one, a module may fail on one of the inner peers only.
        could_stop_one = not self._can_stop and any(feature.may_correct for feature in self._features)
        if self._planned is not None:
            return not self._can_undo or could_stop_one
        ready = self.learner.done and self.schedules.running.plan is not None and not self.learner.varies
        return not ready or not self._can_undo or could_stop_one or self.schedules.swap_due

    def _meet(self, all_know: bool, batch: Batch) -> bool:
        """All ranks, before a step: does what the votes ask for. Returns whether parameters were corrected."""
        if self._correct():
            return True
        if not all_know and self.learner.done:
            self.learn(batch)
        if not self._is_fixed and self._planned is None:
            self.schedules.swap_if_due(batch)
        self._learn_first(batch)
        return False

    @property
    def _is_fixed(self) -> bool:
        return any(feature.is_fixed for feature in self._features)

    def _run(self, attempt: _Attempt, batch: Batch) -> _Outcome:
        """This rank's part of a step. Where there are gradients already, it reads the votes first: to copy gradients
        before each step would cost more."""
        plan, reads_first = self.schedules.plan, attempt.met or self._accumulates()
        is_left_out = not attempt.met and (not attempt.is_known or (reads_first and attempt.is_doomed))
        with self._rank.team.local():
            if is_left_out:
                self.executor.skip(plan)
                return _Outcome()
            undo = snapshot(self._rank, batch) if attempt.is_trial or not reads_first else None
            for tie in self.ties:
                tie.start_step()
            try:
                return _Outcome(self.executor.run(plan, batch, counts=attempt.counts), undo)
            except LostError:
                raise
            except Exception as error:
                counts = reads_first or not self._can_stop or not attempt.is_known_to_be_doomed
                if counts and not (attempt.is_trial and ran_out(error)):
                    raise
                self.executor.abandon()
                return _Outcome(None, undo, self._rank.team.describe(error))

    def _undo(self, outcome: _Outcome) -> None:
        if outcome.undo is not None:
            outcome.undo()
        self._replicas.forget()

    def _correct(self) -> bool:
        """On all ranks: corrects what features did after the last step. Returns whether it was wrong."""
        wrong = [feature.correct() for feature in self._features]  # all of them, not only up to the first
        return any(wrong)

    def _accumulates(self) -> bool:
        return any(p.grad is not None for stage in self._rank.stages.values() for p in stage.parameters())

    def _plan_of_evaluation(self) -> Plan:
        """The loaded one. If it is for another number of micro-batches than were cut already, or if there is none for
        these, forwards in order."""
        running, layout = self.schedules.running.plan, self._rank.layout
        if self.learner.varies and (running is None or running.problem.microbatches != layout.microbatches):
            return forwards_in_order(self._rank.number, layout)
        return self.schedules.plan

    def _require_count(self) -> None:
        """On all ranks alike: raises `InputError` if the step's schedule is for another number of micro-batches."""
        m, scheduled = self._rank.layout.microbatches, self.schedules.plan.problem.microbatches
        if m != scheduled:
            raise InputError(
                f"this step has {m} micro-batches, and the schedule is for {scheduled}: load one for {m}, or let "
                "PlannedSteps make one for every step"
            )

    def _swap_back(self, complaint: str) -> None:
        self.schedules.swap(*self.schedules.running.give_up(complaint))


class _Outcome(NamedTuple):
    """Of this rank's part of a step: no report if it was left out or failed, and the complaint of a failure."""

    report: StepReport | None = None
    undo: Callable[[], None] | None = None
    complaint: str = ""


@dataclass
class _Attempt:
    """One life of a step: what this rank has told the others with it, and what they have told."""

    is_known: bool  # whether batch and modules are as they were, here and on all inner peers
    shared: Shared  # what all ranks tell, on its way
    hear: Callable[[Sequence[int], float | None, bool], None]  # takes what they have told
    features: Sequence[Feature]
    met: bool = False  # the ranks have met before the step, so no vote undoes it
    is_trial: bool = False  # it is the first by its schedule, and undone if a rank runs out of memory

    @cached_property
    def all_know(self) -> bool:
        """Whether batch and modules were on every rank as they had been. Waits until all have begun the step."""
        all_known, *votes, minus_microseconds = self.shared.least(4)
        self.hear(votes, -minus_microseconds / 1e3 or None, bool(all_known))
        return bool(all_known)

    @property
    def is_doomed(self) -> bool:
        """Whether the step must be undone. Waits for the votes, unless the ranks have met."""
        return not self.met and (not self.all_know or any(feature.is_wrong() for feature in self.features))

    @property
    def is_known_to_be_doomed(self) -> bool:
        """The same, but False if the ranks are lost to each other."""
        try:
            return self.is_doomed
        except OptPipeError:
            return False

    def counts(self) -> bool:
        """Whether it will count, whatever happens. Once a backward has begun, all ranks have begun the step, so their
        votes are here, and this waits for none of them."""
        return not self.is_trial and not self.is_doomed
