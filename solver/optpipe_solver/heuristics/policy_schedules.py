"""The schedule that a policy leads to, by list scheduling."""

from __future__ import annotations

from dataclasses import replace
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


def schedule_by_policy(problem: Problem, policy: Policy, method: str, deadline: float = NEVER) -> Schedule | None:
    """Return a schedule that fits if any schedule does.

    Of many micro-batches only some are scheduled, and a period of theirs is repeated, where that is valid. None if the
    deadline, a moment of `time.monotonic`, passes before the schedule is there.
    """
    timed = _alike(problem) if policy.alike else problem
    few = _enough_for_a_period(timed)
    large = is_large(problem) and len(problem.all_routes) == 1
    if large and few * plan.REPEAT_GAIN < problem.microbatches:
        short = _run(timed.model_copy(update={"microbatches": few, "microbatch_routes": None}), policy, deadline)
        if short is None:
            return None
        longer = lengthened(*short, problem.microbatches)
        schedule = _retimed(problem, lift_table(timed, *longer, method)) if longer else None
        if schedule and not check(problem, schedule):  # a repeated period may need more memory than its first run
            return schedule
    found = _run(timed, policy, deadline)
    return _retimed(problem, lift_table(timed, *found, method)) if found else None


def is_large(problem: Problem) -> bool:
    """Whether list scheduling takes longer than about half a second."""
    return len(problem.stages) * problem.microbatches > plan.REPEAT_FORWARDS


def _run(problem: Problem, policy: Policy, deadline: float) -> tuple[Table, Floats] | None:
    scheduler = ListScheduler(problem, policy)
    if not scheduler.run(deadline):
        return None
    return np.array(scheduler.rows, dtype=np.int32).reshape(-1, 5), np.array(scheduler.starts)


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
