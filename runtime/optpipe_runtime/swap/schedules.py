"""`Schedules`: prepares schedules for a pipeline, loads them, and swaps them in between two steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from optpipe.errors import InputError, OptPipeError, ScheduleError
from optpipe.evaluate.jit import compile_at_once
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime.execute.batch import Batch
from optpipe_runtime.execute.executor import Executor
from optpipe_runtime.execute.learner import Learner
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.lowering.plan import Plan
from optpipe_runtime.lowering.prepare import lower, require_valid
from optpipe_runtime.ranks.cpu_group import CpuGroup
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.ranks.subgroup import LostError
from optpipe_runtime.swap.offers import Offers
from optpipe_runtime.swap.running import RunningSchedule
from optpipe_runtime.swap.trials import PlannedStep

log = logging.getLogger("optpipe.runtime")


def share_schedule(cpu_group: CpuGroup, source: int, make: Callable[[], Any]) -> Any:
    """Collective: the schedule, or something else, that rank `source` makes, on every rank. Raises on all ranks the
    `OptPipeError` that making it raises. A schedule travels without what was computed of it."""
    made: Any = None
    if cpu_group.rank == source:
        try:
            made = make()
        except OptPipeError as error:
            made = error
    told = made
    if isinstance(made, Schedule):
        told = _Parts((made.problem, made.programs, dict(made.links), made.method, made.placement))
    received = cpu_group.broadcast(told, source)
    if isinstance(received, OptPipeError):
        raise received
    if isinstance(received, _Parts):
        return made if cpu_group.rank == source else Schedule(*received.parts)
    return received


class _Parts(NamedTuple):
    """Of a schedule, as its constructor takes them."""

    parts: tuple[Any, ...]


class Schedules:
    """The schedules of one rank. `problem` is what was measured here, None before the profile: every schedule must be
    valid and fit for it."""

    def __init__(self, rank: Rank, learner: Learner, executor: Executor) -> None:
        self._rank, self._learner, self._executor = rank, learner, executor
        self.problem: Problem | None = None
        self.running = RunningSchedule(rank.cpu_group)
        self.planned: PlannedStep | None = None  # this step, if it has a schedule of its own
        self._beside = CpuGroup(rank.team)  # for threads that prepare offers beside the training
        self.offers = Offers(rank.cpu_group, self._prepare_offer, self._accept)
        self._batch = Batch()  # of this step

    @property
    def plan(self) -> Plan:
        """What runs. Raises `InputError` if nothing is loaded."""
        plan = self.running.plan if self.planned is None else self.planned.plan
        if plan is None:
            raise InputError("no schedule is loaded: call load(schedule) before the first step")
        return plan

    def offer(self, schedule: Schedule) -> None:
        if self._rank.number != 0:
            raise InputError(f"offer was called on rank {self._rank.number}: schedules are offered on rank 0")
        if self._rank.cpu_group.rank == 0:  # of inner peers the first one's count
            self.offers.offer(schedule)

    def load(self, schedule: Schedule | None) -> None:
        """Collective: swaps to rank 0's schedule on every rank, or on none. Raises `ScheduleError` if it cannot run."""
        compile_at_once()  # here, where no step waits for it
        plan, complaint = None, None
        try:
            plan = self._prepare_shared(schedule, self._rank.cpu_group)
            if self._same_microbatches(plan):
                self.reserve(plan)
        except LostError:
            raise
        except OptPipeError as error:
            plan, complaint = None, str(error)
        if not self._rank.cpu_group.all_equal(None if plan is None else plan.number):
            complaints = self._rank.cpu_group.gather(complaint)
            names = map(self._rank.cpu_group.name_of, range(len(complaints)))
            reasons = [f"rank {name}: {reason}" for name, reason in zip(names, complaints, strict=True) if reason]
            raise ScheduleError(
                reasons[0] if reasons else "the ranks prepared different schedules: they were profiled differently"
            )
        assert plan is not None
        self.swap(plan)

    def heard(self, votes: Sequence[int], step_ms: float | None, same_batch: bool) -> None:
        """What all ranks have told with it: the minimum of their votes; and see `RunningSchedule.heard`."""
        self.offers.heard(*votes)
        self.running.heard(step_ms, same_batch)

    @property
    def swap_due(self) -> bool:
        """Whether the ranks have to meet before the next step."""
        return self.offers.due or self.running.back is not None

    def swap_if_due(self, batch: Batch) -> None:
        """Collective, before a step with this batch."""
        self._batch = batch
        if self.offers.due and (plan := self.offers.take()) is not None:
            self.swap(plan, offered=True)
        elif self.running.back is not None:
            self.swap(*self.running.back)

    def swap(self, plan: Plan, going_back: str = "", offered: bool = False) -> None:
        """Between two steps: runs `plan` from now on. Every rank must swap to the same one."""
        if not self._executor.idle:
            raise OptPipeError("a schedule can be swapped only between two steps")
        if self._same_microbatches(plan):
            self.reserve(plan)
        else:
            self._change_microbatches(plan)
        self.running.swap(plan, offered, going_back)

    def go_back(self, complaint: str) -> None:
        """Collective, after a first step by a schedule that some rank could not finish: swaps to the one before."""
        self.swap(*self.running.give_up(complaint))

    def learn(self, batch: Batch) -> None:
        """Collective: learns what passes between the stages, and reserves host memory for what it finds."""
        varied, known = self._learner.varies, self._learner.done
        learned = self._learn(batch)
        if known and learned and self.problem is not None and not (varied or self._learner.varies):
            log.warning(
                "the batch or the stages differ from the profiled ones: the time and memory that the "
                "schedule needs are not known"
            )
        if self.running.plan is not None and self.planned is None:
            with self._rank.team.local():
                self.reserve(self.running.plan)

    def learn_first(self, batch: Batch) -> None:
        """Collective: the same if nothing was learned yet, or for another number of micro-batches."""
        while not self._learner.done:
            plan, complaint = self.plan, ""
            self._learn(batch)
            try:
                self.reserve(plan)
            except OptPipeError as error:  # too little host memory
                complaint = self._rank.team.describe(error)
            if not self._rank.cpu_group.minimum(not complaint)[0]:
                self.go_back(complaint)

    def _learn(self, batch: Batch) -> bool:
        learned = self._learner.learn(batch)
        self._executor.forget_sizes(learned)
        return learned

    def reserve(self, plan: Plan) -> None:
        """Allocates the host memory that a plan needs, unless it is there. Raises `OptPipeError` if there is too
        little."""
        pool, parts = self._rank.pool, [stage.offload_parts for stage in plan.problem.stages]

        @cache
        def sizes(s: int, level: str) -> list[int]:
            return [pool.size(nbytes) for nbytes in self._rank.stages[s].part_bytes(parts[s], level)]

        pool.reserve(plan.host_peak(lambda s, j, part: sizes(s, plan.recomputed.get((s, j), ""))[part]))

    def _same_microbatches(self, plan: Plan) -> bool:
        return plan.problem.microbatches == self._rank.microbatches

    def _context(self, schedule: Schedule) -> tuple[Layout, Problem | None]:
        """The layout and the problem to check a schedule on. A schedule for another number of micro-batches is checked
        on its own problem: the costs measured here are of larger or smaller micro-batches."""
        layout, scheduled = self._rank.whole_layout, Layout.from_problem(schedule.problem)
        if scheduled.microbatches != layout.microbatches and scheduled.routes == layout.routes:
            return replace(layout, microbatch_routes=scheduled.microbatch_routes), None
        profiled = self.problem if self.problem and self.problem.microbatches == layout.microbatches else None
        return layout, profiled

    def _prepare_shared(self, schedule: Schedule | None, cpu_group: CpuGroup) -> Plan:
        """Collective: rank 0's schedule as this rank's plan. Rank 0 checks it, the others rely on that."""

        def checked() -> Schedule:
            if not isinstance(schedule, Schedule):
                raise InputError(
                    "load was given no optpipe.Schedule on rank 0; if a search found none, its result has the reason"
                )
            require_valid(schedule, *self._context(schedule), self._rank.require)
            return schedule

        shared = share_schedule(cpu_group, 0, checked)
        layout, problem = self._context(shared)
        return lower(shared, self._rank.number, layout, problem)

    def _prepare_offer(self, schedule: Schedule | None) -> Plan:
        plan = self._prepare_shared(schedule, self._beside)
        self.running.require_not_refused(plan)
        if self._same_microbatches(plan):
            self.reserve(plan)  # here, because locking tens of GB takes many seconds
        _ = plan.schedule.makespan_ms  # computed here and kept, for the log of the swap
        return plan

    def _accept(self, plan: Plan) -> None:
        """Raises `OptPipeError` if this rank cannot run the plan now, because of its memory or of this step's batch."""
        if self._same_microbatches(plan):
            self.reserve(plan)
            return
        m = plan.problem.microbatches
        if self._rank.takes_inputs:
            self._batch.cut_inputs(m)
        if self._rank.takes_targets:
            self._batch.cut_targets(m)
        for s in self._rank.stages:
            self._batch.cut_kwargs(s, m)

    def _change_microbatches(self, plan: Plan) -> None:
        """Changes the pipeline to another number of micro-batches. The next step learns its stages again."""
        self._rank.microbatches = plan.problem.microbatches
        self._rank.layout = replace(
            self._rank.layout, microbatch_routes=Layout.from_problem(plan.problem).microbatch_routes
        )
        self._learner.forget()
        if self.problem is not None:
            self.problem = plan.problem
