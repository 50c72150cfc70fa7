"""`StepRunner`: training steps, evaluations and profiles of one rank, with what comes before and after them: replicas,
ties, weights of losses, and repeating a step that must not count (`attempts`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from optpipe.errors import InputError, OptPipeError, ScheduleError
from optpipe_runtime.execute.batch import Batch, require_weights
from optpipe_runtime.execute.executor import Executor
from optpipe_runtime.execute.learner import Learner
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.execute.report import StepReport
from optpipe_runtime.lowering.plan import Plan
from optpipe_runtime.lowering.prepare import forwards_in_order
from optpipe_runtime.measure.budget import require_budget
from optpipe_runtime.measure.measured import Measured
from optpipe_runtime.measure.profiler import profile
from optpipe_runtime.pipeline.arguments import require_bytes
from optpipe_runtime.pipeline.attempts import Attempts, Repeat
from optpipe_runtime.ranks.ties import Tie
from optpipe_runtime.swap.schedules import Schedules
from optpipe_runtime.swap.trials import PlannedStep

CLOSE_S = 5.0  # threads of a pipeline that has failed may wait for other ranks; after this time `close` leaves them


class StepRunner:
    """Every method is collective."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._replicas, self._features = rank, rank.replicas, rank.features
        self.learner, self.executor = Learner(rank, self.gather_all), Executor(rank)
        self.schedules = Schedules(rank, self.learner, self.executor)
        self.ties: list[Tie] = []
        self._attempts = Attempts(rank, self.learner, self.executor, self.schedules, self.ties)
        rank.cpu_group.meet_peers()
        self._owes_gathering = False

    def step(self, batch: Batch, plan: Callable[[], PlannedStep] | None = None) -> StepReport:
        """A step by the loaded schedule, or by one of its own, which `plan` waits for, the same on all ranks. It may
        use `profile_in_step`, and raise `InputError` or `ScheduleError` if there is no schedule."""
        self.schedules.planned = None
        self._rank.reductions.start_step()
        self._weigh(batch)
        self._agree(by_loaded_schedule=plan is None)
        if self._owes_gathering:
            # Corrected by `settle`, before the step. A replica that does so only in the step gathers twice in it
            # (`Repeat.WITH_CORRECTED_PARAMETERS`): this empty gathering is the counterpart.
            self._owes_gathering = False
            with self._replicas.gathering():
                pass
        try:
            report = self._until_it_counts(batch, plan)
        finally:
            self.schedules.planned = None
        if isinstance(report, OptPipeError):
            raise report
        self._rank.team.steps += 1
        for tie in self.ties:
            tie.end_step()
        fields = {name: value for feature in self._features for name, value in feature.report_fields().items()}
        return replace(report, version=self.schedules.running.version, **fields)

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
        self._owes_gathering |= self._attempts.correct()

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
        rank.cpu_group.require_equal(offload_parts=parts, repeats=repeats)

        def require_arguments() -> None:
            if repeats < 1 or parts < 1:
                raise InputError(f"repeats = {repeats}, offload_parts = {parts}: both must be at least 1")
            require_bytes("activation_budget_bytes", activation_budget_bytes)
            if activation_budget_bytes is None:
                require_budget(rank)

        self.gather_all()
        if not rank.cpu_group.minimum(self.learner.knows(batch))[0]:
            self.schedules.learn(batch)
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

    def gather_all(self) -> None:
        """Makes the parameters of all stages whole that have not been gathered, as they are after the last update."""
        for feature in self._features:
            feature.synchronize()
        self._replicas.gather_all()

    # Phases of a step and of an evaluation

    def _agree(self, by_loaded_schedule: bool) -> None:
        """Before the first vote: tells features the plan of this step, if no swap can come first."""
        running = self.schedules.running
        is_certain = by_loaded_schedule and self.learner.done and not self.schedules.swap_due
        for feature in self._features:
            feature.agree_on_step(running.plan if is_certain else None, by_loaded_schedule and running.on_trial)

    def _weigh(self, batch: Batch) -> None:
        """Tells the stages where routes end how much each loss counts. Collective over their replicas."""
        for s in self._rank.layout.last & self._rank.stages.keys():
            stage = self._rank.stages[s]
            stage.loss_factors = None
            if batch.weights is not None:
                require_weights(batch.weights, batch.count or self._rank.microbatches)
                stage.loss_factors = self._rank.means.factors(s, batch.weights)

    def _until_it_counts(self, batch: Batch, plan: Callable[[], PlannedStep] | None) -> StepReport | OptPipeError:
        """Repeats the step in one gathering; in another one after parameters were corrected. An error of `plan` is
        returned, so that this gathering ends as on other replicas."""
        while True:
            with self._replicas.gathering():
                if plan is not None and self.schedules.planned is None:
                    try:
                        planned = self.schedules.planned = plan()
                    except (InputError, ScheduleError) as error:
                        return error
                    self.executor.forget_sizes(self.learner.take(planned.shapes, batch))
                while (result := self._attempts.run(batch)) is Repeat.AS_IT_IS:
                    pass
                if isinstance(result, StepReport):
                    self._rank.reductions.finish()
                    return result

    def _plan_of_evaluation(self) -> Plan:
        """The loaded one. If it is for another number of micro-batches than were cut already, or if there is none for
        these, forwards in order."""
        running, layout = self.schedules.running.plan, self._rank.layout
        if self.learner.varies and (running is None or running.problem.microbatches != layout.microbatches):
            return forwards_in_order(self._rank.number, layout)
        return self.schedules.plan
