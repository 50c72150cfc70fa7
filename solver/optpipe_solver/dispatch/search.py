"""The engine's search: from rules by memory, one change after the other (Storer, Wu and Vaccari 1992).

They call it search in heuristic space: not the order of ops is changed but the rules of a list scheduler that makes it.
So the space is as large as the pipeline is deep, however many micro-batches there are, and one change acts on all of
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from random import Random

from optpipe.evaluate.objective import NEVER, shorter
from optpipe.process.protocol import Frame, Request
from optpipe.schedule import Schedule
from optpipe_solver.dispatch.change import first_rules, neighbour
from optpipe_solver.dispatch.simulate import Rules, Simulator
from optpipe_solver.incumbent import BestSchedule

METHOD = "dispatch"
OPS_PER_S = 3e6  # simulated, about what a busy machine does
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
    for n, (rules, ms) in enumerate(descents(simulator, request, best.schedule)):
        shortest = min(shortest, ms)
        if n == tries and shortest > hopeless_ms:
            break
        spent_s += simulator.ops / OPS_PER_S
        if shorter(ms, best.value) and (schedule := simulator.schedule(rules, METHOD)):
            best.offer(schedule)
        if (spent_s if request.threads == 1 else time.monotonic() - began) > request.time_limit_s:
            break
    return spent_s


def descents(simulator: Simulator, request: Request, given: Schedule | None = None) -> Iterator[tuple[Rules, float]]:
    """Yields rules and the length (ms) that they lead to, `NEVER` if that is too long to matter: descents from one
    start after the other, the best first. Ends if no start leads to a schedule."""
    random, objective = Random(request.seed), request.objective
    starts: list[tuple[float, int, Rules]] = []
    for n, rules in enumerate(first_rules(simulator, given)):
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
