"""The schedules that policies lead to, by list scheduling."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import ceil

import numpy as np

from optpipe.evaluate.objective import NEVER
from optpipe.lift import lift_table
from optpipe.model.arrays import Floats, Table
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, check
from optpipe_solver import plan
from optpipe_solver.heuristics.list_scheduling import ListScheduler
from optpipe_solver.heuristics.periods import lengthened
from optpipe_solver.heuristics.policy import Policy


class PolicySchedules:
    """Schedules of one problem, each by a policy; what the problem alone tells is computed once.

    Parameters
    ----------
    method
        The name that the schedules bear.
    """

    def __init__(self, problem: Problem, method: str) -> None:
        self._problem, self._method = problem, method
        self._schedulers: dict[tuple[bool, bool], ListScheduler] = {}  # with equal times, with few micro-batches

    def schedule(self, policy: Policy, deadline: float = NEVER) -> Schedule | None:
        """Return a schedule that fits if any schedule does.

        Of many micro-batches only some are scheduled, and a period of theirs is repeated, where that is valid. None if
        the deadline, a moment of `time.monotonic`, passes before the schedule is there.
        """
        problem = self._problem
        if self._repeats(policy):
            short = self._run(policy, deadline, few=True)
            if short is None:
                return None
            longer = lengthened(*short, problem.microbatches)
            schedule = self._lifted(policy, *longer) if longer else None
            if schedule and not check(problem, schedule):  # a repeated period may need more memory than its first run
                return schedule
        found = self._run(policy, deadline)
        return self._lifted(policy, *found) if found else None

    def _repeats(self, policy: Policy) -> bool:
        problem = self._problem
        if not is_large(problem) or len(problem.all_routes) > 1:
            return False
        return _enough_for_a_period(self._timed(policy)) * plan.REPEAT_GAIN < problem.microbatches

    def _timed(self, policy: Policy) -> Problem:
        """The problem with the times that count for the policy."""
        return self._alike if policy.alike else self._problem

    @cached_property
    def _alike(self) -> Problem:
        return _alike(self._problem)

    def _run(self, policy: Policy, deadline: float, few: bool = False) -> tuple[Table, Floats] | None:
        if (policy.alike, few) not in self._schedulers:
            timed = self._timed(policy)
            shorter = {"microbatches": _enough_for_a_period(timed), "microbatch_routes": None}
            self._schedulers[policy.alike, few] = ListScheduler(timed.model_copy(update=shorter) if few else timed)
        scheduler = self._schedulers[policy.alike, few]
        if not scheduler.run(policy, deadline):
            return None
        return np.array(scheduler.rows, dtype=np.int32).reshape(-1, 5), np.array(scheduler.starts)

    def _lifted(self, policy: Policy, table: Table, start: Floats) -> Schedule:
        return _retimed(self._problem, lift_table(self._timed(policy), table, start, self._method))


def is_large(problem: Problem) -> bool:
    """Whether list scheduling takes longer than about half a second."""
    return len(problem.stages) * problem.microbatches > plan.REPEAT_FORWARDS


def _retimed(problem: Problem, schedule: Schedule) -> Schedule:
    """The same programs on a problem with other times: what fits and runs does so whatever the times are."""
    return schedule if schedule.problem is problem else replace(schedule, problem=problem)


def _alike(problem: Problem) -> Problem:
    """The problem with each time the longest of all stages."""
    times = ("forward_ms", "backward_input_ms", "backward_weight_ms", "offload_ms", "reload_ms", "recompute_ms")
    longest = {name: max(getattr(stage, name) or 0.0 for stage in problem.stages) for name in times}
    stages = tuple(
        stage.model_copy(update={name: longest[name] for name in times if getattr(stage, name) is not None})
        for stage in problem.stages
    )
    return problem.model_copy(update={"stages": stages})


def _enough_for_a_period(problem: Problem) -> int:
    """Return about three times the micro-batches that are in flight at full speed: to fill the pipeline, to see what
    repeats, and to drain it."""
    ms, device = problem.costs.ms, problem.costs.device
    latency = float(ms[[Kind.F, Kind.B]].sum()) + 2 * problem.p2p_ms * (len(problem.stages) - 1)
    work = np.bincount(device, weights=ms[[Kind.F, Kind.BW]].sum(axis=0))
    return 3 * ceil(latency / float(work.max())) + 8 if work.max() else 8
