"""Rules to start from, and how they are changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Literal

import numpy as np

from optpipe.dispatch.clock import AGAIN
from optpipe.dispatch.memory_shares import CHOICES, memory_shares
from optpipe.dispatch.simulate import Rules, Simulator
from optpipe.model.arrays import Flags, Floats, Ints
from optpipe.model.ops import BACKWARD, Kind
from optpipe.schedule import Schedule

Relief = Literal["leaves", "again"]

RELIEFS: tuple[Relief, ...] = ("leaves", "again")  # what can become of an activation that does not stay
SHARES = (1 / 4, 1 / 2, 3 / 4, 1.0)  # of the activations of each stage, at first


def first_rules(simulator: Simulator, given: Schedule | None = None) -> Iterator[Rules]:
    """Yields rules that share each device's memory among its stages and wait for nothing: where all activations stay,
    and where some leave or are computed again. And those that the given schedule seems to follow."""
    if given is not None:
        yield rules_of(simulator, given)
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
    steps = np.floor(np.outer(share * most, np.arange(simulator.problem.microbatches + 1)) + phase).astype(np.int64)
    counts: Ints = np.diff(steps, axis=1)
    return counts if relief == "leaves" else AGAIN * counts


def rules_of(simulator: Simulator, schedule: Schedule) -> Rules:
    """The rules that a schedule on one route seems to follow: its most micro-batches in flight, and what leaves in it.
    Where it has more or fewer stages, each one follows that at the same place of the route."""
    costs, (route, *_) = schedule.problem.costs, schedule.problem.all_routes
    before, after = (len(route), schedule.problem.microbatches), (len(simulator.route), simulator.problem.microbatches)
    leaves, in_flight = np.zeros(before, dtype=np.int64), np.ones(before[0], dtype=np.int64)
    place = {s: k for k, s in enumerate(route)}
    flying = np.zeros(before[0], dtype=np.int64)
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
    like = np.rint(np.linspace(0, before[0] - 1, after[0])).astype(int)
    leaves = leaves[like][:, _alike(before[1], after[1])]
    can_leave = np.where(leaves < 0, simulator.can_recompute[:, None], simulator.parts[:, None])
    return Rules(
        np.ceil(in_flight[like] * after[0] / before[0]).astype(np.int64),
        np.zeros((2, after[0])),
        np.sign(leaves) * np.minimum(np.abs(leaves), can_leave),
        simulator.carry_ms,
    )


def _alike(before: int, after: int) -> Ints:
    """(after,) which of `before` micro-batches each one is to be like: the first and the last ones stay what they are,
    in between some are repeated or left out."""
    k = max(1, before // 2)
    first, more = (before - k) // 2, np.arange(after - before)
    longer = np.r_[0 : first + k, first + more % k, first + k : before]
    alike: Ints = longer if after > before else np.r_[0 : after - after // 2, before - after // 2 : before]
    return alike


def neighbour(simulator: Simulator, rules: Rules, random: Random) -> Rules:
    """Other rules for some devices in a row: at one stage of each or at all, what is in flight, how long is waited, or
    what leaves and when it comes back; or what one stage has in flight more, another has less."""
    visits, devices = simulator.visits, len(simulator.memory)
    chunks, can = int(visits.max()) + 1, [relief for relief in RELIEFS if simulator.can(relief).any()]
    while True:
        begin = random.randrange(devices)
        end = begin + 1 + int(random.expovariate(4 / devices))
        if random.random() < 0.15:
            begin, end = 0, devices
        among = (begin <= simulator.device) & (simulator.device < end)
        nth, other = random.randrange(-1, chunks), random.randrange(-1, chunks)  # -1: all stages of the device, or none
        chosen = among & ((visits == nth) | (nth < 0))
        if can and random.random() < 0.6:
            rules = _relieved(simulator, rules, random, chosen, random.choice(can))
        elif random.random() < 0.5:
            in_flight, step = rules.in_flight.copy(), random.choice((-1, 1))
            in_flight[chosen] += step
            if -1 < nth != other:
                in_flight[among & (visits == other)] -= step
            rules = replace(rules, in_flight=in_flight.clip(1, simulator.problem.microbatches))
        else:
            wait_ms, k = rules.wait_ms.copy(), random.randrange(2)
            share = random.choice((0.0, 0.3 * random.random(), random.random()))
            wait_ms[k, chosen] = share * simulator.ms[k, chosen]
            rules = replace(rules, wait_ms=wait_ms)
        if random.random() < 0.7:
            return rules


def _relieved(simulator: Simulator, rules: Rules, random: Random, chosen: Flags, relief: Relief) -> Rules:
    """Rules by which the chosen stages' activations come back sooner or later, others of them leave or are computed
    again, or some of them one after the other do or do not."""
    what = random.random()
    if what < 0.2:
        lead_ms, factor = rules.lead_ms.copy(), random.choice((0.0, 1.0, 1.5, 4 * random.random()))
        lead_ms[chosen] = factor * simulator.carry_ms[chosen]
        return replace(rules, lead_ms=lead_ms)
    leaves, m = rules.leaves.copy(), simulator.problem.microbatches
    if what < 0.4:
        share = random.choice((0.0, 1.0, random.random(), random.randrange(1, 8) / 8))
        leaves[chosen] = spread(simulator, relief, np.full(len(leaves), share), random.random())[chosen]
        return replace(rules, leaves=leaves)
    if what < 0.6:  # another micro-batch instead
        j, step = random.randrange(m), random.choice((-1, 1))
        if 0 <= j + step < m:
            leaves[chosen, j], leaves[chosen, j + step] = leaves[chosen, j + step], leaves[chosen, j]
        return replace(rules, leaves=leaves)
    first = random.randrange(m)
    span = slice(first, first + 1 + int(random.expovariate(1.0)))
    most = simulator.parts if relief == "leaves" else -simulator.can_recompute.astype(np.int64)
    value = np.array([random.randint(min(0, n), max(0, n)) for n in most.tolist()])
    leaves[chosen, span] = value[chosen, None]
    return replace(rules, leaves=leaves)
