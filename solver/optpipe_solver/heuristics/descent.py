"""Better and better policies: one aspect after the other is changed, and kept where the simulated schedule is
shorter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from time import monotonic
from typing import Any

from optpipe.model.problem import Problem
from optpipe.process.child import Objective
from optpipe.schedule import Schedule
from optpipe_solver.heuristics.pairs import paired
from optpipe_solver.heuristics.policy import Policy
from optpipe_solver.heuristics.policy_schedules import listed

VAIN = 120  # policies that may be tried without one of them being better
SHARES = (
    0.0,
    1 / 4,
    1 / 3,
    1 / 2,
    2 / 3,
    3 / 4,
    1.0,
)  # of the activations that leave, or of those that are computed again


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
    """Coordinate descent over the policies' fields, from each start, then stage by stage; a schedule is yielded for
    every policy tried.

    Whoever iterates decides when it is enough. It ends where nothing has made the schedule shorter for long, and soon
    after the deadline (a moment of `time.monotonic`), be it in the middle of a schedule.
    """
    known: dict[Policy, float] = {}

    def tried(policy: Policy) -> Iterator[Schedule]:
        if policy not in known:
            schedule = listed(problem, policy, method, deadline)
            known[policy] = value(schedule, objective) if schedule else float("inf")
            if schedule:
                yield schedule
                if (together := paired(schedule)) is not None and value(together, objective) < known[policy]:
                    known[policy] = value(together, objective)
                    yield together

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
    best, random, in_vain = min(known, key=lambda policy: known[policy]), Random(0), 0
    while in_vain < VAIN and monotonic() < deadline:
        policy = _mixed(best, aspects, problem, random)
        yield from tried(policy)
        in_vain = 0 if known[policy] < known[best] else in_vain + 1
        if known[policy] <= known[best]:  # what is as good may lead on
            best = policy


def _mixed(policy: Policy, aspects: Mapping[str, Sequence[Any]], problem: Problem, random: Random) -> Policy:
    """Another choice of one aspect; of what differs from stage to stage, a step for some neighbouring stages."""
    aspect = random.choice([name for name, choices in aspects.items() if len(choices) > 1])
    stages = len(problem.stages)
    begin, end = sorted(random.sample(range(stages + 1), 2))
    if aspect == "in_flight":
        most = list(policy.in_flight or [min(problem.microbatches, 2 * stages)] * stages)
        step = random.choice((-2, -1, 1, 2))
        return replace(policy, in_flight=tuple(max(1, n + step) if begin <= s < end else n for s, n in enumerate(most)))
    if aspect in ("offload", "recompute"):
        can = problem.costs.can_offload if aspect == "offload" else problem.costs.can_recompute
        shares, share = getattr(policy, aspect) or [0.0] * stages, random.choice(SHARES)
        mixed = tuple(share * bool(can[s]) if begin <= s < end else old for s, old in enumerate(shares))
        change: dict[str, Any] = {aspect: mixed}
        return replace(policy, **change)
    return replace(policy, **{aspect: random.choice(aspects[aspect])})
