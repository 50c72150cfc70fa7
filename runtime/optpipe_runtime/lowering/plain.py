"""Schedules that need no solver."""

from __future__ import annotations

from functools import lru_cache

from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime.lowering.plan import Plan
from optpipe_runtime.lowering.prepare import lower
from optpipe_runtime.ranks.layout import Layout


def one_at_a_time(problem: Problem) -> Schedule:
    """The schedule that needs the least memory: each micro-batch forward and back before the next."""
    programs: list[list[str]] = [[] for _ in problem.devices]
    for j in range(problem.microbatches):
        route = problem.route(j)
        for kind, stages in (("F", route), ("BW", tuple(reversed(route)))):
            for s in stages:
                programs[problem.stages[s].device].append(f"{s}{kind}{j}")
    return Schedule.parse(problem, programs, method="one at a time")


@lru_cache(maxsize=64)
def forwards_in_order(rank: int, layout: Layout) -> Plan:
    """For an evaluation: the micro-batches' forwards, one after the other, on each stage."""
    return lower(one_at_a_time(layout.unmeasured()), rank, layout)
