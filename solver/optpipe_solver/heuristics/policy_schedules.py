"""`listed`: the schedule that a policy leads to."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import numpy as np

from optpipe.evaluate.graph import Floats, Table
from optpipe.evaluate.validity import check
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_solver.heuristics.list_scheduling import Listing
from optpipe_solver.heuristics.periods import lengthened
from optpipe_solver.heuristics.policy import Policy
from optpipe_solver.lift import lift_table

WORTHWHILE = 1.5  # a schedule of so many times fewer micro-batches is made first, and its period repeated
MANY = 10_000  # forwards: list scheduling takes longer than half a second


def listed(problem: Problem, policy: Policy, method: str, deadline: float = float("inf")) -> Schedule | None:
    """It fits if any schedule does; None where the deadline, a moment of `time.monotonic`, passes before it is done."""
    on = _alike(problem) if policy.alike else problem
    few = _enough_for_a_period(on)
    if len(on.stages) * on.microbatches > MANY and len(on.all_routes) == 1 and few * WORTHWHILE < on.microbatches:
        short = _run(on.model_copy(update={"microbatches": few, "microbatch_routes": None}), policy, deadline)
        if short is None:
            return None
        longer = lengthened(*short, on.microbatches)
        schedule = _on(problem, lift_table(on, *longer, method)) if longer else None
        if schedule and not check(problem, schedule):
            return schedule
    found = _run(on, policy, deadline)
    return _on(problem, lift_table(on, *found, method)) if found else None


def _run(problem: Problem, policy: Policy, deadline: float) -> tuple[Table, Floats] | None:
    listing = Listing(problem, policy)
    if not listing.run(deadline):
        return None
    return np.array(listing.rows, dtype=np.int32).reshape(-1, 5), np.array(listing.starts)


def _on(problem: Problem, schedule: Schedule) -> Schedule:
    """What fits and runs does so whatever the times are."""
    return schedule if schedule.problem is problem else replace(schedule, problem=problem)


def _alike(problem: Problem) -> Problem:
    """With each time the longest of all stages."""
    times = ("forward_ms", "backward_input_ms", "backward_weight_ms", "offload_ms", "reload_ms", "recompute_ms")
    longest = {name: max(getattr(stage, name) or 0.0 for stage in problem.stages) for name in times}
    stages = tuple(
        stage.model_copy(update={name: longest[name] for name in times if getattr(stage, name) is not None})
        for stage in problem.stages
    )
    return problem.model_copy(update={"stages": stages})


def _enough_for_a_period(problem: Problem) -> int:
    """Micro-batches for about three times what is in flight at full speed: to fill the pipeline, to see what repeats,
    and to drain it."""
    ms, device = problem.costs.ms, problem.costs.device
    latency = float(ms[[Kind.F, Kind.B]].sum()) + 2 * problem.p2p_ms * (len(problem.stages) - 1)
    work = np.bincount(device, weights=ms[[Kind.F, Kind.BW]].sum(axis=0))
    return 3 * ceil(latency / float(work.max())) + 8 if work.max() else 8
