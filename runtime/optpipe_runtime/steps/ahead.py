"""`StepsAhead`: the ranks prepare a step while the one before runs, in a thread of each that no step waits for.

They gather which micro-batches the step has and what the last ones took. The rank of the first stage, without
which none can begin a step, plans it, and sends problem and schedule to all. Each checks the schedule on this problem
and lowers it; if all could, it will run, else each micro-batch alone, one after the other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from math import ceil
from typing import NamedTuple

from optpipe.errors import InputError, OptPipeError
from optpipe.model.figures import of_microbatch
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime.execute.rank import Rank
from optpipe_runtime.lowering.plan import Plan
from optpipe_runtime.lowering.prepare import lower, one_at_a_time, require_valid
from optpipe_runtime.memory.engines import ThreadEngine
from optpipe_runtime.ranks.cpu_group import CpuGroup
from optpipe_runtime.ranks.team import LostError
from optpipe_runtime.steps.planner import StepAnnouncement, Unmeasured
from optpipe_runtime.swap.schedules import PlannedStep, share_schedule

log = logging.getLogger("optpipe.runtime")


# Plans a step, given the announcements of all ranks; until the flag is set it may look for a better schedule.
Planner = Callable[[Sequence[StepAnnouncement], threading.Event], Schedule | Unmeasured]


class PreparedStep(NamedTuple):
    """A step that is being prepared on this rank."""

    begins: threading.Event
    planned: Future[PlannedStep | Unmeasured]

    def wait(self) -> PlannedStep | Unmeasured:
        """When the step is to begin. Raises what went wrong."""
        self.begins.set()
        return self.planned.result()


class StepsAhead:
    """One rank's part; rank `planner` plans. Making one and every call is collective; steps are prepared in the order
    of the calls."""

    def __init__(self, rank: Rank, planner: int) -> None:
        self._rank, self.planner = rank, planner
        self._group = CpuGroup(rank.team)  # for the thread
        self._thread = ThreadEngine()

    def prepare(self, announcement: StepAnnouncement, plan: Planner | None) -> PreparedStep:
        """Begins to prepare a step, without waiting. `plan` is there on the rank that plans."""
        step = PreparedStep(threading.Event(), Future())

        def prepare() -> None:
            try:
                step.planned.set_result(self._prepare(announcement, plan, step.begins))
            except BaseException as error:
                step.planned.set_exception(error)

        self._thread.run(prepare)
        return step

    def close(self) -> None:
        if self._rank.team.failure is None:
            self._thread.close()

    def _prepare(
        self, announcement: StepAnnouncement, plan: Planner | None, begins: threading.Event
    ) -> PlannedStep | Unmeasured:
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
        schedule = share_schedule(self._group, self.planner, lambda: plan and plan(by_rank, begins))
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
        try:
            require_valid(schedule, layout, problem, rank.require)
            plan = lower(schedule, rank.number, layout, problem)
            rank.pool.reserve(plan.host_peak(lambda s, j, part: rank.pool.size(_part_bytes(problem, s, j))))
        except LostError:
            raise
        except OptPipeError as error:
            log.warning("rank %s cannot run the schedule of the next step: %s", rank.team.name, error)
            return None
        return plan


def _part_bytes(problem: Problem, s: int, j: int) -> int:
    stage = problem.stages[s]
    return ceil(of_microbatch(stage.activation_bytes, j) / stage.offload_parts)
