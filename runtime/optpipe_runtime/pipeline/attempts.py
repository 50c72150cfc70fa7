"""`Attempts`: the life of a step: **vote**; **meet**, if the ranks must; **run**, or leave it out; then it counts, or
all ranks **undo** it, and it is repeated.

No rank waits for the others between two steps. Their votes they send when they begin a step, and read when they end it:
then all have begun it, because a rank's last op needs ops of all others. So a vote decides about the step that it was
sent with, which may have to be undone, and about the one after. Only where a swap is due, or nothing can be undone, do
the ranks meet before a step. Inner peers agree before each whether to run it.

A step does not count if
- batch, modules or what is trained have changed on a rank. This rank lets the others finish theirs, with zeros of the
  old shapes; then the stages are learned again;
- a feature was wrong about what it did before the step, and corrects it (`Feature.is_wrong`);
- it was the first one by a schedule, and a rank ran out of memory. All ranks then go back to the schedule before. Of
  steps with schedules of their own, this is so for one that may hold more bytes than all before; it runs again with one
  micro-batch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from optpipe.errors import InputError, OptPipeError
from optpipe_runtime.execute.batch import Batch
from optpipe_runtime.execute.executor import Executor
from optpipe_runtime.execute.handler import Feature
from optpipe_runtime.execute.learner import Learner
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.execute.report import StepReport
from optpipe_runtime.ranks.cpu_group import Shared
from optpipe_runtime.ranks.subgroup import LostError
from optpipe_runtime.ranks.ties import Tie
from optpipe_runtime.swap.schedules import Schedules
from optpipe_runtime.swap.trials import PlannedTrials, ran_out, snapshot


class Repeat(Enum):
    """Why a step runs again."""

    AS_IT_IS = "it was undone"
    WITH_CORRECTED_PARAMETERS = "parameters were corrected, so that they are gathered again"


class Attempts:
    """Every method is collective. `ties` are those of the pipeline."""

    def __init__(
        self, rank: Rank, learner: Learner, executor: Executor, schedules: Schedules, ties: Sequence[Tie]
    ) -> None:
        self._rank, self._features, self._ties = rank, rank.features, ties
        self._learner, self._executor, self._schedules = learner, executor, schedules
        self._can_undo = not any(feature.irreversible for feature in rank.features)
        # Inner peers leave a step out together, but one that stops within an op would leave the others in a collective
        # of the user's.
        self._can_stop = len(rank.team.inner) == 1
        self._last_ms, self._last_version = 0.0, 0  # of the last step here, until the others are told
        self._trials = PlannedTrials(rank.cpu_group)

    def run(self, batch: Batch) -> StepReport | Repeat:
        """One life of the step."""
        attempt = self._vote(batch)
        attempt.met = self._must_meet()
        if attempt.met and self._meet(attempt.all_know, batch):
            return Repeat.WITH_CORRECTED_PARAMETERS
        self._require_count()
        running, planned = self._schedules.running, self._schedules.planned
        is_new = running.on_trial if planned is None else self._trials.is_due(planned.plan)
        attempt.is_trial = is_new and self._can_undo and self._can_stop and not self._is_fixed
        outcome = self._run(attempt, batch)
        if attempt.is_doomed:
            self._undo(outcome)
            if self.correct():
                return Repeat.WITH_CORRECTED_PARAMETERS
            self._schedules.learn(batch)
            return Repeat.AS_IT_IS
        if attempt.is_trial and not self._rank.cpu_group.minimum(outcome.report is not None)[0]:
            self._undo(outcome)
            if planned is None:
                self._schedules.go_back(outcome.complaint)
            else:
                self._trials.give_up(planned, outcome.complaint)
            return Repeat.AS_IT_IS
        self.correct()  # drops what was kept of an update that was right
        assert outcome.report is not None
        if planned is None:
            running.end_step()
            self._last_ms = outcome.report.step_ms
        else:
            self._trials.end_step(planned.plan)
        self._last_version = running.version
        return outcome.report

    def correct(self) -> bool:
        """Corrects what features did after the last step. Returns whether it was wrong."""
        wrong = [feature.correct() for feature in self._features]  # all of them, not only up to the first
        return any(wrong)

    def _vote(self, batch: Batch) -> _Attempt:
        """Tells the others what they must know of this rank, without waiting."""
        is_known = self._learner.knows(batch)
        microseconds = round(1e3 * self._last_ms) if self._last_version == self._schedules.running.version else 0
        self._last_ms = 0.0
        shared = self._rank.cpu_group.share(is_known, *self._schedules.offers.votes(), -microseconds)
        # `share` comes first: it waits for nobody, and tells inner peers that are in another method, before
        # `peers_agree` waits for them.
        is_known = self._rank.cpu_group.peers_agree(is_known) if self._can_undo else is_known
        return _Attempt(is_known, shared, self._schedules.heard, self._features)

    def _must_meet(self) -> bool:
        """Whether all ranks read the votes before the step."""
        # By an update that was not the right one, a module may fail on one of the inner peers only.
        could_stop_one = not self._can_stop and any(feature.may_correct for feature in self._features)
        if self._schedules.planned is not None:
            return not self._can_undo or could_stop_one
        ready = self._learner.done and self._schedules.running.plan is not None and not self._learner.varies
        return not ready or not self._can_undo or could_stop_one or self._schedules.swap_due

    def _meet(self, all_know: bool, batch: Batch) -> bool:
        """All ranks, before a step: does what the votes ask for. Returns whether parameters were corrected."""
        if self.correct():
            return True
        if not all_know and self._learner.done:
            self._schedules.learn(batch)
        if not self._is_fixed and self._schedules.planned is None:
            self._schedules.swap_if_due(batch)
        self._schedules.learn_first(batch)
        return False

    @property
    def _is_fixed(self) -> bool:
        return any(feature.is_fixed for feature in self._features)

    def _require_count(self) -> None:
        """On all ranks alike: raises `InputError` if the step's schedule is for another number of micro-batches."""
        m, scheduled = self._rank.layout.microbatches, self._schedules.plan.problem.microbatches
        if m != scheduled:
            raise InputError(
                f"this step has {m} micro-batches, and the schedule is for {scheduled}: load one for {m}, or let "
                "PlannedSteps make one for every step"
            )

    def _run(self, attempt: _Attempt, batch: Batch) -> _Outcome:
        """This rank's part of a step. Where there are gradients already, it reads the votes first: to copy gradients
        before each step would cost more."""
        plan, reads_first = self._schedules.plan, attempt.met or self._accumulates()
        is_left_out = not attempt.met and (not attempt.is_known or (reads_first and attempt.is_doomed))
        with self._rank.team.local():
            if is_left_out:
                self._executor.skip(plan)
                return _Outcome()
            undo = snapshot(self._rank, batch) if attempt.is_trial or not reads_first else None
            for tie in self._ties:
                tie.start_step()
            try:
                return _Outcome(self._executor.run(plan, batch, will_count=attempt.will_count), undo)
            except LostError:
                raise
            except Exception as error:
                counts = reads_first or not self._can_stop or not attempt.must_undo
                if counts and not (attempt.is_trial and ran_out(error)):
                    raise
                self._executor.abandon()
                return _Outcome(None, undo, self._rank.team.describe(error))

    def _undo(self, outcome: _Outcome) -> None:
        if outcome.undo is not None:
            outcome.undo()
        self._rank.replicas.forget()

    def _accumulates(self) -> bool:
        return any(p.grad is not None for stage in self._rank.stages.values() for p in stage.parameters())


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
    def must_undo(self) -> bool:
        """The same, but False if the ranks are lost to each other."""
        try:
            return self.is_doomed
        except OptPipeError:
            return False

    def will_count(self) -> bool:
        """Whether it will count, whatever happens. Once a backward has begun, all ranks have begun the step, so their
        votes are here, and this waits for none of them."""
        return not self.is_trial and not self.is_doomed
