"""Rules that a search starts from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from optpipe.dispatch.clock import AGAIN
from optpipe.dispatch.memory_shares import CHOICES, memory_shares
from optpipe.dispatch.simulate import Simulator, carry_ms
from optpipe.model.arrays import Floats, Ints
from optpipe.model.ops import BACKWARD, Kind
from optpipe.model.problem import Problem
from optpipe.model.rules import Rules
from optpipe.schedule import Schedule

Relief = Literal["leaves", "again"]

RELIEFS: tuple[Relief, ...] = ("leaves", "again")  # what can become of an activation that does not stay
INSTANT_MS = 1e-9  # what takes no longer takes no time
SHARES = (1 / 4, 1 / 2, 3 / 4, 1.0)  # of the activations of each stage, at first


def first_rules(simulator: Simulator, given: Schedule | None = None) -> Iterator[Rules]:
    """Yields rules that share each device's memory among its stages and wait for nothing: where all activations stay,
    and where some leave or are computed again. Before them those of the given schedule, and those that it seems to
    follow."""
    if given is not None:
        if given.rules is not None and (own := moved(simulator, given.rules, given.problem)):
            yield own
        if seeming := moved(simulator, rules_of(given), given.problem):
            yield seeming
    stages = len(simulator.route)
    to_the_end, none = stages - np.arange(stages), np.zeros((stages, simulator.problem.microbatches), dtype=np.int64)
    shares = [memory_shares(simulator.problem, more, extra) for more, extra in CHOICES]
    for in_flight in shares:
        yield Rules(in_flight, np.zeros((2, stages)), none, simulator.carry_ms)
    for relief in RELIEFS:
        for share in SHARES if any(simulator.can(relief)) else ():
            leaves = spread(simulator, relief, np.full(stages, share), 0.0)
            for in_flight in (np.minimum(np.ceil(shares[0] / max(1 - share, 0.1)).astype(int), to_the_end), to_the_end):
                yield Rules(in_flight, np.zeros((2, stages)), leaves, simulator.carry_ms)


def spread(simulator: Simulator, relief: Relief, share: Floats, phase: float) -> Ints:
    """(S, m) what becomes of activations if of each stage's a share, evenly spread, leaves or is computed again."""
    most = simulator.parts if relief == "leaves" else simulator.can_recompute.astype(np.int64)
    counts: Ints = evenly((share * most)[:, None], phase, np.arange(simulator.problem.microbatches)).astype(np.int64)
    return counts if relief == "leaves" else AGAIN * counts


def evenly(each: Floats, phase: float, j: Ints) -> Floats:
    """How many of the j-th activation leave if of each so many, a fraction, are to leave on average."""
    return np.floor(each * (j + 1) + phase) - np.floor(each * j + phase)


def rules_of(schedule: Schedule) -> Rules:
    """The rules that a schedule on one route seems to follow: most micro-batches in flight, and what leaves."""
    costs, (route, *_) = schedule.problem.costs, schedule.problem.all_routes
    leaves = np.zeros((len(route), schedule.problem.microbatches), dtype=np.int64)
    flying, in_flight = np.zeros(len(route), dtype=np.int64), np.ones(len(route), dtype=np.int64)
    place = {s: k for k, s in enumerate(route)}
    for program in schedule.programs:
        for op in program.ops():
            k = place[op.stage]
            if op.kind == Kind.F:
                flying[k] += 1
                in_flight[k] = max(in_flight[k], flying[k])
            elif op.kind in BACKWARD:
                flying[k] -= 1
            elif op.kind == Kind.O:
                leaves[k, op.microbatch] = min(leaves[k, op.microbatch] + 1, costs.parts[op.stage])
            elif op.kind == Kind.C:
                leaves[k, op.microbatch] = AGAIN
    return Rules(in_flight, np.zeros((2, len(route))), leaves, carry_ms(costs, np.array(route)))


def moved(simulator: Simulator, rules: Rules, problem: Problem) -> Rules | None:
    """Rules of a problem with one route, for the simulator's; None if they are not of its stages and micro-batches.

    Times follow those of the ops. Where there are more or fewer stages, each one follows that at the same place of the
    route.
    """
    costs, route = problem.costs, np.array(problem.route(0))
    before, after = (len(route), problem.microbatches), (len(simulator.route), simulator.problem.microbatches)
    if rules.leaves.shape != before:
        return None
    like = np.rint(np.linspace(0, before[0] - 1, after[0])).astype(int)
    leaves = rules.leaves[like][:, _alike(before[1], after[1])]
    can_leave = np.where(leaves < 0, simulator.can_recompute[:, None], simulator.parts[:, None])
    lasted, carried = costs.ms[np.ix_(np.array((Kind.F, Kind.B)), route[like])], carry_ms(costs, route[like])
    return Rules(
        np.ceil(rules.in_flight[like] * after[0] / before[0]).clip(1, after[1]).astype(np.int64),
        _scaled(rules.wait_ms[:, like], lasted, simulator.ms[:2], np.zeros_like(lasted)),
        np.sign(leaves) * np.minimum(np.abs(leaves), can_leave),
        _scaled(rules.lead_ms[like], carried, simulator.carry_ms, simulator.carry_ms),
    )


def _scaled(value: Floats, before: Floats, after: Floats, otherwise: Floats) -> Floats:
    """The value as it is to `after` what it was to `before`; another one where that was nothing."""
    there = before > INSTANT_MS
    return np.where(there, value * (after / np.where(there, before, 1.0)), otherwise)


def _alike(before: int, after: int) -> Ints:
    """(after,) which of `before` micro-batches each one is to be like: the first and the last ones stay what they are,
    in between some are repeated or left out."""
    k = max(1, before // 2)
    first, more = (before - k) // 2, np.arange(after - before)
    longer = np.r_[0 : first + k, first + more % k, first + k : before]
    alike: Ints = longer if after > before else np.r_[0 : after - after // 2, before - after // 2 : before]
    return alike
