"""The engine's search: from rules by memory, one change after the other (Storer, Wu and Vaccari 1992).

They call it search in heuristic space: not the order of ops is changed but the rules of a list scheduler that makes it.
So the space is as large as the pipeline is deep, however many micro-batches there are, and one change acts on all of
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from random import Random

import numpy as np

from optpipe.evaluate.objective import NEVER, shorter
from optpipe.process.protocol import Frame, Request
from optpipe_solver.dispatch.simulate import Rules, Simulator
from optpipe_solver.heuristics.memory_shares import CHOICES, memory_shares
from optpipe_solver.incumbent import BestSchedule

METHOD = "dispatch"
OPS_PER_S = 4e6  # simulated, about half of what a quiet machine does
SLACK = 0.001  # about so much longer than the rules at hand new ones may be (threshold accepting, Dueck 1990)
FAILURES = 1500  # changes in a row without a shorter schedule, after which the search starts anew
HOPELESS = (500, 1.1)  # after so many tries it is over if all are so many times longer than the schedule given


def search(request: Request, emit: Callable[[Frame], None]) -> float:
    """Runs the engine; returns the seconds used by its own count of simulated ops.

    With one thread these are what is limited, so that the search is the same on a busy machine.
    """
    began, spent_s = time.monotonic(), 0.0
    best = BestSchedule(request, emit)
    simulator, shortest, (tries, factor) = Simulator(request.problem), NEVER, HOPELESS
    hopeless_ms = factor * best.value
    for n, (rules, ms) in enumerate(descents(simulator, request)):
        shortest = min(shortest, ms)
        if n == tries and shortest > hopeless_ms:
            break
        spent_s += simulator.ops / OPS_PER_S
        if shorter(ms, best.value) and (schedule := simulator.schedule(rules, METHOD)):
            best.offer(schedule)
        if (spent_s if request.threads == 1 else time.monotonic() - began) > request.time_limit_s:
            break
    return spent_s


def descents(simulator: Simulator, request: Request) -> Iterator[tuple[Rules, float]]:
    """Yields rules and the length (ms) that they lead to, `NEVER` if that is too long to matter: descents from one
    start after the other, the best first. Ends if no start leads to a schedule."""
    random, objective = Random(request.seed), request.objective
    starts: list[tuple[float, int, Rules]] = []
    for n, rules in enumerate(first_rules(simulator)):
        ms = simulator.length_ms(rules, objective)
        yield rules, ms
        starts.append((ms, n, rules))
    starts = [start for start in sorted(starts) if start[0] < NEVER]
    while starts:
        for ms, _, rules in starts:
            shortest, failures = ms, 0
            while failures < FAILURES:
                changed = neighbour(simulator, rules, random)
                most = ms * (1 + random.expovariate(1) * SLACK)
                found = simulator.length_ms(changed, objective, most)
                yield changed, found
                failures = 0 if shorter(found, shortest) else failures + 1
                shortest = min(shortest, found)
                if found <= most:
                    rules, ms = changed, found


def first_rules(simulator: Simulator) -> Iterator[Rules]:
    """Yields rules that share each device's memory among its stages, and wait for nothing."""
    for more, extra in CHOICES:
        shares = memory_shares(simulator.problem, more, extra)
        yield Rules(shares, np.zeros((2, len(shares))))


def neighbour(simulator: Simulator, rules: Rules, random: Random) -> Rules:
    """Other rules for some devices in a row: at one stage of each or at all, what is in flight or how long is waited;
    or what one stage has in flight more, another has less."""
    in_flight, wait_ms = rules.in_flight.copy(), rules.wait_ms.copy()
    visits, devices = simulator.visits, len(simulator.memory)
    chunks = int(visits.max()) + 1
    while True:
        begin = random.randrange(devices)
        end = begin + 1 + int(random.expovariate(4 / devices))
        if random.random() < 0.15:
            begin, end = 0, devices
        among = (begin <= simulator.device) & (simulator.device < end)
        nth, other = random.randrange(-1, chunks), random.randrange(-1, chunks)  # -1: all stages of the device, or none
        chosen = among & ((visits == nth) | (nth < 0))
        if random.random() < 0.5:
            step = random.choice((-1, 1))
            in_flight[chosen] += step
            if -1 < nth != other:
                in_flight[among & (visits == other)] -= step
            np.clip(in_flight, 1, simulator.problem.microbatches, out=in_flight)
        else:
            k = random.randrange(2)
            share = random.choice((0.0, 0.3 * random.random(), random.random()))
            wait_ms[k, chosen] = share * simulator.ms[k, chosen]
        if random.random() < 0.7:
            return Rules(in_flight, wait_ms)
