"""Better and better policies: one aspect after the other is changed, and kept where the simulated schedule is shorter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

from optpipe.child import Objective
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe_solver.heuristics.listed import listed
from optpipe_solver.heuristics.policy import Policy


def value(schedule: Schedule, objective: Objective) -> float:
    """What is to be small, in ms."""
    return schedule.makespan_ms if objective == "makespan" else schedule.span_ms


def descend(
    problem: Problem,
    objective: Objective,
    starts: Sequence[Policy],
    aspects: Mapping[str, Sequence[Any]],
    method: str,
    deadline: float = float("inf"),
) -> Iterator[Schedule]:
    """Coordinate descent over the policies' fields, from each start; a schedule is yielded for every policy tried.

    Whoever iterates decides when it is enough. It ends where no single change of an aspect makes the schedule shorter, and soon after the
    deadline (a moment of `time.monotonic`), be it in the middle of a schedule.
    """
    known: dict[Policy, float] = {}

    def tried(policy: Policy) -> Iterator[Schedule]:
        if policy not in known:
            schedule = listed(problem, policy, method, deadline)
            known[policy] = value(schedule, objective) if schedule else float("inf")
            if schedule:
                yield schedule

    for start in starts:
        yield from tried(start)
    for best in sorted(starts, key=lambda start: known[start]):
        improves = True
        while improves and monotonic() < deadline:
            improves = False
            for aspect, choices in aspects.items():
                for choice in choices:
                    policy = replace(best, **{aspect: choice})
                    yield from tried(policy)
                    if known[policy] < known[best]:
                        best, improves = policy, True
