"""`StepRunner`: training steps and evaluations of one rank, with what comes before and after the executor: learning the
stages, swapping schedules, replicas, ties, and repeating a step that ran out of memory."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from optpipe.errors import OptPipeError
from optpipe_runtime.execute.executor import Executor
from optpipe_runtime.execute.learner import Learner
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.execute.report import StepReport
from optpipe_runtime.lowering.plan import Plan
from optpipe_runtime.ranks.replicas import Replicas
from optpipe_runtime.ranks.ties import Tie
from optpipe_runtime.swap.schedules import Schedules
from optpipe_runtime.swap.undo import ran_out, snapshot

log = logging.getLogger("optpipe.runtime")


class StepRunner:
    """Every method is collective."""

    def __init__(self, rank: Rank, replicas: Replicas) -> None:
        self._rank, self._replicas = rank, replicas
        self._learner, self.executor = Learner(rank), Executor(rank)
        self.schedules = Schedules(rank, self._learner, self.executor)
        self.ties: list[Tie] = []
        # A step that updates parameters on the host cannot be undone. Nor can one with inner peers: a rank that stops
        # within an op leaves them in a collective of the user's.
        self._can_undo = bool(rank.cpu_group.minimum(not rank.host_optimizers)[0]) and len(rank.team.inner) == 1
        self._last_ms: float | None = None  # of the last step here

    def step(self, inputs: Any, targets: Any, trace: bool) -> StepReport:
        known = self._learner.knows(inputs, targets)
        running = self.schedules.running
        with self._replicas.whole():
            microseconds = round(1e3 * (self._last_ms or 0))
            offered, (all_know, slowest) = self.schedules.boundary((inputs, targets), known, -microseconds)
            last_ms = None if self._last_ms is None else -slowest / 1e3
            back = running.begin_step(last_ms, same_batch=bool(all_know))
            if not all_know and self._learner.done:
                self.learn(inputs, targets)
            if offered is not None:
                self.schedules.swap(offered, offered=True)
            elif back is not None:
                self.schedules.swap(*back)
            report = self._run(inputs, targets, trace)
            self._replicas.reduce()
        for tie in self.ties:
            tie.end_step()
        self._last_ms = report.step_ms
        return replace(report, version=running.version)

    def evaluate(self, inputs: Any, targets: Any, trace: bool) -> StepReport:
        with self._replicas.whole():
            if not self._rank.cpu_group.minimum(self._learner.knows_batch(inputs, targets))[0]:
                self.learn(inputs, targets)
            plan = self.schedules.plan
            with self._rank.team.local():
                report = self.executor.run(plan, inputs, targets, trace, evaluating=True)
        return replace(report, version=self.schedules.running.version)

    def require_learned(self, inputs: Any, targets: Any) -> None:
        if not self._rank.cpu_group.minimum(self._learner.knows(inputs, targets))[0]:
            self.learn(inputs, targets)

    def learn(self, inputs: Any, targets: Any) -> None:
        """Learns what passes between the stages, and reserves host memory for what it finds."""
        if self._learner.done and self.schedules.problem is not None:
            log.warning(
                "the batch or the stages differ from the profiled ones: the time and memory that the "
                "schedule needs are not known"
            )
        self._learner.learn(inputs, targets)
        if self.schedules.running.plan is not None:
            with self._rank.team.local():
                self.schedules.reserve(self.schedules.running.plan)

    def _run(self, inputs: Any, targets: Any, trace: bool) -> StepReport:
        """A step by the loaded schedule. If the first step by it runs out of memory, the step is undone and repeated by
        the schedule before."""
        running, cpu_group = self.schedules.running, self._rank.cpu_group
        while True:
            plan = self.schedules.plan
            if not self._learner.done:  # nothing was learned yet, or for another number of micro-batches
                self._learner.learn(inputs, targets)
                complaint = self._memory_complaint(plan)
                if not cpu_group.minimum(not complaint)[0]:
                    self.schedules.swap(*running.give_up(complaint))
                    continue
            undo = snapshot(self._rank, (inputs, targets)) if running.on_trial and self._can_undo else None
            for tie in self.ties:
                tie.start_step()
            complaint = ""
            with self._rank.team.local():
                try:
                    report = self.executor.run(plan, inputs, targets, trace)
                except Exception as error:
                    if undo is None or not ran_out(error):
                        raise
                    complaint = self._rank.team.describe(error)
                    self.executor.abandon()
            if undo is None or cpu_group.minimum(not complaint)[0]:
                running.end_step()
                return report
            undo()
            self._replicas.forget()
            self.schedules.swap(*running.give_up(complaint))

    def _memory_complaint(self, plan: Plan) -> str:
        """Why this rank lacks host memory for a plan; empty if it does not."""
        try:
            self.schedules.reserve(plan)
        except OptPipeError as error:
            return self._rank.team.describe(error)
        return ""
