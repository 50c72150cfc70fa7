"""`Schedules`: which schedule a pipeline runs, what is prepared to replace it, and when to go back to the one before.

A pipeline goes back if an offered schedule is measured to be slower (one that the user loads is meant to run), or if
the first step by it runs out of memory: all ranks then undo that step and repeat it. A step may have a schedule of its
own, for that step only; it may be undone, too, if it may hold more bytes than all such steps before.

A schedule that is offered on rank 0 is prepared on every rank beside the training, in a thread of its own. With each
step the ranks vote how far they are, and before the first step after that in which all were ready, they swap. No step
waits for one that is still being prepared. If a rank refuses it, all ranks keep what they have.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import gt
from typing import Any

from optpipe.errors import InputError, OptPipeError, ScheduleError
from optpipe.evaluate.jit import compile_at_once
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime.execute.batch import Batch, BatchShapes
from optpipe_runtime.execute.learner import Learner
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.lowering.plan import Plan
from optpipe_runtime.lowering.prepare import lower, require_valid
from optpipe_runtime.ranks.cpu_group import CpuGroup
from optpipe_runtime.ranks.layout import Layout
from optpipe_runtime.ranks.team import LostError
from optpipe_runtime.swap.step_times import StepTimes

log = logging.getLogger("optpipe.runtime")

REFUSED, PREPARING, READY = 0, 1, 2  # of an offer: the minimum over all ranks counts
REFUSAL = "a schedule was offered and refused, training goes on with the one it has: %s"


@dataclass
class PlannedStep:
    """A step with a schedule of its own, that all ranks have prepared."""

    plan: Plan
    shapes: Sequence[BatchShapes | InputError]  # of its micro-batches, by rank
    one_at_a_time: Callable[[], Plan | None]  # makes the plan if memory runs out; None if this rank cannot run it


class Schedules:
    """The schedules of one rank. What is not of this rank's plan is the same on every rank."""

    def __init__(self, rank: Rank, learner: Learner) -> None:
        self._rank, self._learner = rank, learner
        self.problem: Problem | None = None  # what was measured here: every schedule must be valid and fit for it
        self.loaded: Plan | None = None  # the plan that was loaded or swapped in last
        self.version = 0  # how many were
        self.planned: PlannedStep | None = None  # this step, if it has a schedule of its own
        self._lock = threading.Lock()
        self._newest: Schedule | None = None  # offered and not yet shared; a newer offer replaces it
        self._preparation: _Preparation | None = None  # of one offer at a time
        self._offer_due = False  # on all ranks alike: all are ready to swap
        self._beside = CpuGroup(rank.team)  # for threads that prepare offers beside the training
        self._steps = 0
        self._is_first = False  # the next step is the first by the loaded schedule
        self._before: Plan | None = None  # to go back to from that one
        self._back: tuple[Plan, str] | None = None  # the schedule to go back to before the next step, and why
        self._refused: set[str] = set()  # digests of schedules that went wrong
        self._step_times = StepTimes()
        self._last_ms = 0.0  # of the last step here by the loaded schedule, until it is sent to the others
        self._most_bytes: list[int] = []  # certified for each device, of all planned steps that have run

    @property
    def plan(self) -> Plan:
        """What runs. Raises `InputError` if nothing is loaded."""
        plan = self.loaded if self.planned is None else self.planned.plan
        if plan is None:
            raise InputError("no schedule is loaded: call load(schedule) before the first step")
        return plan

    @property
    def on_trial(self) -> bool:
        """Whether this step is to be undone if a rank runs out of memory."""
        if self.planned is None:
            return self._is_first
        return not self._most_bytes or any(map(gt, _certified(self.planned.plan), self._most_bytes))

    # Between two steps, from outside

    def offer(self, schedule: Schedule) -> None:
        """From any thread of rank 0. Returns at once."""
        if self._rank.number != 0:
            raise InputError(f"offer was called on rank {self._rank.number}: schedules are offered on rank 0")
        if self._rank.cpu_group.rank != 0:  # of inner peers the first one's count
            return
        if not isinstance(schedule, Schedule):
            raise InputError(f"offer was given a {type(schedule).__name__}: an optpipe.Schedule can be offered")
        with self._lock:
            self._newest = schedule

    @property
    def preparing(self) -> bool:
        """Whether an offer is being prepared: between two steps the same on all ranks."""
        return self._preparation is not None

    def load(self, schedule: Schedule | None) -> None:
        """Collective: swaps to rank 0's schedule on every rank, or on none. Raises `ScheduleError` if it cannot run."""
        compile_at_once()  # here, where no step waits for it
        plan, complaint = None, None
        try:
            plan = self._prepare_shared(schedule, self._rank.cpu_group)
            self._reserve_now(plan)
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
        self._swap(plan)

    # Around a step

    def votes(self) -> tuple[int, int, int]:
        """What this rank votes: for the offer, and its last step's time in microseconds, negative."""
        microseconds, self._last_ms = round(1e3 * self._last_ms), 0.0
        with self._lock:
            nothing_new = self._newest is None
        return READY if self._preparation is None else self._preparation.state, nothing_new, -microseconds

    def count(self, votes: Sequence[int], same_batch: bool) -> None:
        """Takes the least of all ranks' `votes` for a step. `same_batch`: batch and model have the shapes of before."""
        state, nothing_new, minus_microseconds = votes
        if self._preparation is not None:
            self._offer_due = state == READY
            if state == REFUSED:
                self._preparation = None
        elif not nothing_new:
            with self._lock:
                schedule, self._newest = self._newest, None
            self._preparation = _Preparation(lambda: self._prepare_offer(schedule))
        slower = self._step_times.add(-minus_microseconds / 1e3) if minus_microseconds else None
        if not same_batch:
            self._step_times.forget()
        elif slower is not None:
            slow, before = slower
            why = f"takes {slow.median:.1f} ms a step, measured, and this one {before.median:.1f} ms"
            self._back = before.plan, why

    @property
    def swap_due(self) -> bool:
        """Whether the ranks have to meet before the next step."""
        return self._offer_due or self._back is not None

    def swap_if_due(self, batch: Batch) -> None:
        """Collective, before a step with this batch."""
        if self._offer_due and (plan := self._take_offer(batch)) is not None:
            self._swap(plan, offered=True)
        elif self._back is not None:
            self._swap(*self._back)

    def end_step(self, ms: float) -> None:
        """A step counts, which took so long here."""
        if self.planned is None:
            self._steps, self._is_first, self._before, self._last_ms = self._steps + 1, False, None, ms
        else:
            peaks = _certified(self.planned.plan)
            self._most_bytes = list(map(max, peaks, self._most_bytes or peaks))

    def give_up(self, complaint: str) -> None:
        """Collective, after a step on trial that some rank could not finish: the loaded schedule is that of before; a
        step with a schedule of its own runs one micro-batch at a time. Raises `OptPipeError` if that is no way out."""
        why = next(text for text in self._rank.cpu_group.gather(complaint) if text)
        if self.planned is None:
            if self._before is None:
                raise OptPipeError(
                    f"{why}; the step is undone, and there is no schedule to go back to: load one that needs less "
                    "memory"
                )
            self._swap(self._before, f"ran out of memory: {why}")
            return
        plan = self.planned.one_at_a_time()
        if plan is not None and plan.digest == self.planned.plan.digest:
            plan = None
        if not self._rank.cpu_group.all_equal(None if plan is None else plan.number):
            raise OptPipeError(
                f"{why}; the step is undone: leave it out or cut its largest micro-batch, and give a smaller "
                "activation_budget_bytes"
            )
        assert plan is not None
        if self._rank.cpu_group.rank == 0:
            log.warning(
                "%s; the step runs again, one micro-batch at a time: give a smaller activation_budget_bytes", why
            )
        self.planned.plan = plan

    def reserve(self, plan: Plan) -> None:
        """Allocates the host memory that a plan still needs. Raises `OptPipeError` if there is too little."""
        pool, parts = self._rank.pool, [stage.offload_parts for stage in plan.problem.stages]

        @cache
        def sizes(s: int, level: str) -> list[int]:
            return [pool.size(nbytes) for nbytes in self._rank.stages[s].part_bytes(parts[s], level)]

        pool.reserve(plan.host_peak(lambda s, j, part: sizes(s, plan.recomputed.get((s, j), ""))[part]))

    # Swap

    def _swap(self, plan: Plan, going_back: str = "", offered: bool = False) -> None:
        """Runs `plan` from now on, as every rank does. `going_back` says what was wrong with the schedule before."""
        if not self._reserve_now(plan):  # the next step learns its stages again
            self._rank.microbatches = plan.problem.microbatches
            routes = Layout.from_problem(plan.problem).microbatch_routes
            self._rank.layout = replace(self._rank.layout, microbatch_routes=routes)
            self._learner.forget()
            if self.problem is not None:
                self.problem = plan.problem
        before = self.loaded
        if self._rank.cpu_group.rank == 0:
            text = f"step {self._steps + 1}: schedule {_name(plan)} (predicted {plan.schedule.makespan_ms:.1f} ms)"
            text += f" replaces {_name(before)}" if before else ""
            log.info("%s", f"{text}, which {going_back}" if going_back else text)
        if going_back:
            assert before is not None
            self._refused.add(before.digest)
        elif not offered:
            self._refused.discard(plan.digest)  # loading it makes it welcome again
        self._step_times.swapped(plan, comparable=offered)
        self._before, self.loaded = None if going_back else before, plan
        self._is_first, self._back, self._last_ms = True, None, 0.0
        self.version += 1

    def _reserve_now(self, plan: Plan) -> bool:
        """Reserves host memory, and returns True, unless sizes for another number of micro-batches come first."""
        if plan.problem.microbatches != self._rank.microbatches:
            return False
        self.reserve(plan)
        return True

    # Preparation

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

    def _context(self, schedule: Schedule) -> tuple[Layout, Problem | None]:
        """The layout and the problem to check a schedule on: its own where it has another number of micro-batches."""
        layout, scheduled = self._rank.whole_layout, Layout.from_problem(schedule.problem)
        if scheduled.microbatches != layout.microbatches and scheduled.routes == layout.routes:
            return replace(layout, microbatch_routes=scheduled.microbatch_routes), None
        profiled = self.problem if self.problem and self.problem.microbatches == layout.microbatches else None
        return layout, profiled

    def _prepare_offer(self, schedule: Schedule | None) -> Plan:
        plan = self._prepare_shared(schedule, self._beside)
        if plan.digest in self._refused:
            raise ScheduleError(f"{_name(plan)} has run here before, and was slower than another or ran out of memory")
        self._reserve_now(plan)  # here, because locking tens of GB takes many seconds
        _ = plan.schedule.makespan_ms  # computed here and kept, for the log of the swap
        return plan

    def _take_offer(self, batch: Batch) -> Plan | None:
        """Collective, between two steps, when a swap is due: the plan to swap to, on every rank; None if one of them
        cannot run it now, because of its memory or of this step's batch."""
        assert self._preparation is not None
        plan, self._preparation, self._offer_due = self._preparation.plan, None, False
        try:
            if plan is not None and not self._reserve_now(plan):
                self._rank.cut(batch, plan.problem.microbatches)
        except OptPipeError as error:
            log.warning(REFUSAL, error)
            plan = None
        return plan if self._rank.cpu_group.all_equal(None if plan is None else plan.number) else None

    def close(self) -> None:
        if self._preparation is not None:
            self._preparation.join()


class _Preparation(threading.Thread):
    """One offer being prepared, with collectives that the training does not use."""

    def __init__(self, prepare: Callable[[], Plan]) -> None:
        super().__init__(name="optpipe-prepare", daemon=True)
        self._prepare = prepare
        self.plan: Plan | None = None
        self.start()

    def run(self) -> None:
        try:
            self.plan = self._prepare()
        except LostError:
            pass  # the next step of every rank will report it
        except OptPipeError as error:
            log.warning(REFUSAL, error)
        except Exception:
            log.exception("a schedule was offered and could not be prepared, training goes on with the one it has")

    @property
    def state(self) -> int:
        return PREPARING if self.is_alive() else READY if self.plan is not None else REFUSED


def share_schedule(cpu_group: CpuGroup, source: int, make: Callable[[], Any]) -> Any:
    """Collective: the schedule, or something else, that rank `source` makes, on every rank. Raises on all ranks the
    `OptPipeError` that making it raises. A schedule travels without what was computed of it."""
    result: Any = None
    if cpu_group.rank == source:
        try:
            result = make()
        except OptPipeError as error:
            result = error
    is_schedule, sent = isinstance(result, Schedule), result
    if is_schedule:
        sent = result.problem, result.programs, dict(result.links), result.method, result.placement
    is_schedule, received = cpu_group.broadcast((is_schedule, sent), source)
    if isinstance(received, OptPipeError):
        raise received
    return result if cpu_group.rank == source else Schedule(*received) if is_schedule else received


def _certified(plan: Plan) -> list[int]:
    """The most bytes that each device may hold."""
    return [peak.bytes for peak in plan.certificate.device]


def _name(plan: Plan) -> str:
    return plan.schedule.method or plan.digest[:8]
