"""Coordinate descent over policies: one aspect after the other is changed, and kept if the schedule becomes shorter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from time import monotonic
from typing import Any

from optpipe.evaluate.objective import NEVER, Objective, length_ms
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_solver import plan
from optpipe_solver.heuristics.list_scheduling import ListScheduler
from optpipe_solver.heuristics.pairs import join_pairs
from optpipe_solver.heuristics.policy import Policy


def descend(
    problem: Problem,
    objective: Objective,
    starts: Sequence[Policy],
    aspects: Mapping[str, Sequence[Any]],
    method: str,
    deadline: float = NEVER,
) -> Iterator[Schedule]:
    """Change the policies' fields one by one, from each start, then stage by stage; yield a schedule of every policy.

    Parameters
    ----------
    starts
        The policies to begin with.
    aspects
        The choices for each field of a policy.
    method
        The name that the schedules bear.
    deadline
        A moment of `time.monotonic`. The descent ends soon after it, be it in the middle of a schedule, or when
        nothing has made the schedule shorter for long. Whoever iterates decides when it is enough.
    """
    scheduler, lengths_ms = ListScheduler(problem), dict[Policy, float]()

    def schedules(policy: Policy) -> Iterator[Schedule]:
        if policy in lengths_ms:
            return
        schedule = scheduler.schedule(policy, method, deadline)
        lengths_ms[policy] = length_ms(schedule, objective)
        if schedule:
            yield schedule
            if (joined := join_pairs(schedule)) is not None and length_ms(joined, objective) < lengths_ms[policy]:
                lengths_ms[policy] = length_ms(joined, objective)
                yield joined

    for start in starts:
        yield from schedules(start)
    for best in sorted(starts, key=lambda start: lengths_ms[start]):
        improves = True
        while improves and monotonic() < deadline:
            improves = False
            for aspect, choices in aspects.items():
                for choice in choices:
                    policy = replace(best, **{aspect: choice})
                    yield from schedules(policy)
                    if lengths_ms[policy] < lengths_ms[best]:
                        best, improves = policy, True
    best, random, failures = min(lengths_ms, key=lambda policy: lengths_ms[policy]), Random(0), 0
    while failures < plan.DESCENT_FAILURES and monotonic() < deadline:
        policy = _neighbour(best, aspects, random)
        yield from schedules(policy)
        failures = 0 if lengths_ms[policy] < lengths_ms[best] else failures + 1
        if lengths_ms[policy] <= lengths_ms[best]:  # what is as good may lead on
            best = policy


def _neighbour(policy: Policy, aspects: Mapping[str, Sequence[Any]], random: Random) -> Policy:
    """Another choice of one aspect: of the order of entry, two other micro-batches change places; of what differs from
    stage to stage, some neighbouring stages have it."""
    aspect = random.choice([name for name, choices in aspects.items() if len(choices) > 1])
    if aspect == "order":
        order = list(policy.order or sorted(aspects[aspect][-1]))
        i, j = random.sample(range(len(order)), 2)
        order[i], order[j] = order[j], order[i]
        return replace(policy, order=tuple(order))
    choice, before = random.choice(aspects[aspect]), getattr(policy, aspect)
    if isinstance(before, tuple):
        begin, end = sorted(random.sample(range(len(before) + 1), 2))
        choice = (*before[:begin], *choice[begin:end], *before[end:])
    return replace(policy, **{aspect: choice})
