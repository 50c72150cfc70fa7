"""`StepRunner`: training steps, evaluations and profiles of one rank, with what comes before and after them: learning
the stages, swapping schedules, replicas, ties, and repeating a step that must not count.

No rank waits for the others between two steps. What ranks have to tell each other (their votes) they send when they
begin a step, and read when they end it: then all have begun it, because a rank's last op needs ops of all others. So a
vote decides about the step that it was sent with, which may have to be undone, and about the one after. Only where a
swap is due, or nothing can be undone, do the ranks meet before a step. Inner peers agree before each whether to run it.

A step does not count, and is undone and repeated on all ranks, if
- batch, modules or what is trained have changed on a rank. This rank lets the others finish theirs, with zeros of the
  old shapes; then the stages are learned again;
- the optimizer step before was not the right one (`PostValidation`);
- it was the first one by a schedule, and a rank ran out of memory. All ranks then go back to the schedule before.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from optpipe.errors import InputError, OptPipeError
from optpipe_runtime.arguments import require_bytes, require_equal
from optpipe_runtime.execute.batch import Batch
from optpipe_runtime.execute.executor import Executor
from optpipe_runtime.execute.learner import Learner
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.execute.reductions import Reductions
from optpipe_runtime.execute.report import StepReport
from optpipe_runtime.lowering.plan import Plan
from optpipe_runtime.measure.profiler import Measured, profile, require_budget
from optpipe_runtime.post_validation import PostValidation
from optpipe_runtime.ranks.cpu_group import Shared
from optpipe_runtime.ranks.subgroup import LostError
from optpipe_runtime.ranks.ties import Tie
from optpipe_runtime.swap.schedules import Schedules
from optpipe_runtime.swap.undo import ran_out, snapshot

log = logging.getLogger("optpipe.runtime")

CLOSE_S = 5.0  # threads of a pipeline that has failed may wait for other ranks; after this time `close` leaves them


class StepRunner:
    """Every method is collective."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._replicas = rank, rank.replicas
        self._reductions = Reductions(rank.replicas, rank.device)
        self._learner, self.executor = Learner(rank), Executor(rank, self._reductions)
        self.schedules = Schedules(rank, self._learner, self.executor)
        self.ties: list[Tie] = []
        self.validations: list[PostValidation] = []
        # A step that updates parameters on the host cannot be undone. Inner peers leave a step out together, but one
        # that stops within an op would leave the others in a collective of the user's.
        self._can_undo = bool(rank.cpu_group.minimum(not rank.host_optimizers)[0])
        self._can_stop = len(rank.team.inner) == 1
        rank.cpu_group.meet_peers()
        self._last_ms, self._last_version = 0.0, 0  # of the last step here, until the others are told
        self._gathers_again = False

    def step(self, batch: Batch) -> StepReport:
        self._reductions.start_step(self._agree_on_windows())
        if self._gathers_again:  # as another replica may, which corrects its parameters in this step only
            with self._replicas.gathering():
                self._gathers_again = False
        report = None
        while report is None:
            with self._replicas.gathering():
                report = self._step(batch)
                if report is not None:
                    self._reductions.finish()
        for tie in self.ties:
            tie.end_step()
        self._last_ms, self._last_version = report.step_ms, self.schedules.running.version
        norm = self.validations[-1].norm if self.validations else None
        return replace(report, version=self._last_version, grad_norm=norm)

    def evaluate(self, batch: Batch) -> StepReport:
        with self._replicas.gathering():
            if not self._rank.cpu_group.minimum(self._learner.knows_batch(batch))[0]:
                self.learn(batch)
            plan = self.schedules.plan
            with self._rank.team.local():
                report = self.executor.run(plan, batch, evaluating=True)
        return replace(report, version=self.schedules.running.version)

    def settle(self) -> None:
        """Between two steps: corrects the last optimizer step if it was not the right one."""
        for validation in self.validations:
            validation.settle()
            self._gathers_again |= validation.taken_back
            validation.taken_back = False  # all ranks are here, so no other has begun a step

    def profile(self, batch: Batch, activation_budget_bytes: int | None, parts: int, repeats: int) -> Measured:
        """As `Pipeline.profile`."""
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

        with self._replicas.gathering():
            self.gather_all()
            if not rank.cpu_group.minimum(self._learner.knows(batch))[0]:
                self.learn(batch)
            rank.cpu_group.on_each_rank(require_arguments)
            with rank.team.local():
                measured = profile(rank, batch, activation_budget_bytes, parts, repeats)
        if rank.cpu_group.rank == 0:
            measured.tell()
        self.schedules.problem = measured.problem
        return measured

    def close(self) -> None:
        """Ends the threads of the pipeline."""
        for validation in self.validations:
            validation.close()
        if self._rank.team.failure is None:
            try:
                for validation in self.validations:
                    validation.settle()
            finally:
                self._end_threads()
        else:
            thread = threading.Thread(target=self._end_threads, name="optpipe-close", daemon=True)
            thread.start()
            thread.join(CLOSE_S)

    def _end_threads(self) -> None:
        self.schedules.close()
        self._rank.close()
        self._reductions.close()

    def learn(self, batch: Batch) -> None:
        """Learns what passes between the stages, and reserves host memory for what it finds."""
        if self._learner.done and self.schedules.problem is not None:
            log.warning(
                "the batch or the stages differ from the profiled ones: the time and memory that the "
                "schedule needs are not known"
            )
        self._learn(batch)
        if self.schedules.running.plan is not None:
            with self._rank.team.local():
                self.schedules.reserve(self.schedules.running.plan)

    def gather_all(self) -> None:
        """Makes the parameters of all stages whole that have not been gathered, as they are after the last update."""
        for optimizer in self._rank.host_optimizers.values():
            optimizer.synchronize()
        self._replicas.gather_all()

    def _learn(self, batch: Batch) -> None:
        self.gather_all()
        self._learner.learn(batch)
        self.executor.forget_sizes()

    def _agree_on_windows(self) -> bool:
        """Collective over the replicas: whether this step reduces gradients in windows. It does if all replicas run the
        same schedule for the same problem, and none may change it in this step."""
        running, whole = self.schedules.running, self._rank.whole_gradients
        if whole is None:
            return False
        ready = running.plan is not None and self._learner.done and not self.schedules.swap_due
        agreed = self._replicas.agree((running.plan.number ^ whole) if ready and running.plan is not None else 0)
        # On all ranks of the pipeline, where that decides whether the step can be undone.
        return bool(self._rank.cpu_group.minimum(agreed)[0]) if running.on_trial else agreed

    def _step(self, batch: Batch) -> StepReport | None:
        """A step that counts. None if it does not, because parameters were corrected: run it again with these."""
        running = self.schedules.running
        while True:
            vote = self._vote(self._learner.knows(batch))
            # By an update that was not the right one, a module may fail on one of the inner peers only.
            settling = bool(self.validations) and not self._can_stop
            can_run = self._can_undo and self._learner.done and running.plan is not None and not settling
            meeting = not can_run or self.schedules.swap_due
            if meeting:
                all_know = vote.all_know
                if self._correct():
                    return None
                if not all_know and self._learner.done:
                    self.learn(batch)
                if not self._reductions.in_windows:  # which are those of the schedule that runs
                    self.schedules.swap_if_due(batch)
                self._learn_first(batch)
            # What windows have reduced is in the other replicas' gradients, so a step in windows is no trial.
            trial = running.on_trial and self._can_undo and self._can_stop and not self._reductions.in_windows
            outcome = self._run(batch, vote, settled=meeting, trial=trial)
            if not meeting and vote.doomed:
                self._undo(outcome)
                if self._correct():
                    return None
                self.learn(batch)
            elif trial and not self._rank.cpu_group.minimum(not outcome.complaint)[0]:
                self._undo(outcome)
                self._swap_back(outcome.complaint)
            else:
                self._correct()  # drops what was kept of an update that was right
                running.end_step()
                return outcome.report

    def _vote(self, known: bool) -> _Vote:
        microseconds = round(1e3 * self._last_ms) if self._last_version == self.schedules.running.version else 0
        self._last_ms = 0.0
        shared = self._rank.cpu_group.share(known, *self.schedules.votes(), -microseconds)
        # What is shared waits for nobody, and tells peers that have called another method before this waits for them.
        known = self._rank.cpu_group.peers_agree(known) if self._can_undo else known
        return _Vote(known, shared, self.schedules, self.validations)

    def _run(self, batch: Batch, vote: _Vote, settled: bool, trial: bool) -> _Outcome:
        """This rank's part of a step. `settled`: no vote of another rank will undo it."""
        plan, doomed = self.schedules.plan, not settled and not vote.known
        if not settled and not doomed and self._accumulates():  # to copy gradients before each step would cost more
            settled, doomed = True, vote.doomed
        with self._rank.team.local():
            if doomed:
                self.executor.skip(plan)
                return _Outcome()

            def completed(s: int) -> None:
                """All ranks have begun the step by now, so their votes are here: this waits for none of them."""
                if self._reductions.any and not trial and (settled or not vote.doomed):
                    self._reductions.complete(s)

            def window_ended(s: int) -> None:
                """The same: no stage begins its backwards before all ranks have begun the step."""
                if settled or not vote.doomed:
                    self._reductions.end_window(s)
                else:
                    self._replicas.forget()

            undo = snapshot(self._rank, batch) if trial or not settled else None
            for tie in self.ties:
                tie.start_step()
            try:
                report = self.executor.run(plan, batch, completed=completed, window_ended=window_ended)
                return _Outcome(report, undo)
            except LostError:
                raise
            except Exception as error:
                counts = settled or not self._can_stop or not vote.known_to_be_doomed
                if counts and not (trial and ran_out(error)):
                    raise
                self.executor.abandon()
                return _Outcome(None, undo, self._rank.team.describe(error))

    def _undo(self, outcome: _Outcome) -> None:
        if outcome.undo is not None:
            outcome.undo()
        self._replicas.forget()

    def _correct(self) -> bool:
        """On all ranks: corrects the optimizer step before. Returns whether it was not the right one."""
        wrong = any(validation.is_wrong() for validation in self.validations)
        for validation in self.validations:
            validation.settle()
            validation.taken_back = False
        return wrong

    def _accumulates(self) -> bool:
        return any(p.grad is not None for stage in self._rank.stages.values() for p in stage.module.parameters())

    def _learn_first(self, batch: Batch) -> None:
        """If nothing was learned yet, or for another number of micro-batches."""
        while not self._learner.done:
            plan = self.schedules.plan
            self._learn(batch)
            complaint = self._memory_complaint(plan)
            if not self._rank.cpu_group.minimum(not complaint)[0]:
                self._swap_back(complaint)

    def _swap_back(self, complaint: str) -> None:
        self.schedules.swap(*self.schedules.running.give_up(complaint))

    def _memory_complaint(self, plan: Plan) -> str:
        """Why this rank lacks host memory for a plan; empty if it does not."""
        try:
            self.schedules.reserve(plan)
        except OptPipeError as error:
            return self._rank.team.describe(error)
        return ""


class _Outcome(NamedTuple):
    """Of this rank's part of a step: no report if it was left out or failed, and the complaint of a failure."""

    report: StepReport | None = None
    undo: Callable[[], None] | None = None
    complaint: str = ""


class _Vote:
    """What this rank tells the others with a step, and what they have told. `known`: whether batch and modules are as
    they were, here and on all inner peers."""

    def __init__(
        self, known: bool, shared: Shared, schedules: Schedules, validations: Sequence[PostValidation]
    ) -> None:
        self.known, self._shared, self._schedules, self._validations = known, shared, schedules, validations

    @cached_property
    def all_know(self) -> bool:
        """Whether batch and modules were on every rank as they had been. Waits until all have begun the step."""
        known, *votes, minus_microseconds = self._shared.least(4)
        self._schedules.heard(votes, -minus_microseconds / 1e3 or None, bool(known))
        return bool(known)

    @property
    def doomed(self) -> bool:
        """Whether the step must be undone if the ranks did not meet before it."""
        return not self.all_know or any(validation.is_wrong() for validation in self._validations)

    @property
    def known_to_be_doomed(self) -> bool:
        """The same, but False if the ranks are lost to each other."""
        try:
            return self.doomed
        except OptPipeError:
            return False
