"""Search in rules: from rules by memory, one change after the other (Storer, Wu and Vaccari 1992).

They call it search in heuristic space: not the order of ops is changed but the rules of a list scheduler that makes it.
So the space is as large as the pipeline is deep, however many micro-batches there are, and one change acts on all of
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from optpipe.dispatch.change import first_rules, neighbour
from optpipe.dispatch.simulate import Rules, Simulator
from optpipe.evaluate.objective import NEVER, Objective, shorter
from optpipe.schedule import Schedule

SLACK = 0.001  # about so much longer than the rules at hand new ones may be (threshold accepting, Dueck 1990)
FAILURES = 1500  # changes in a row without a shorter schedule, after which the search starts anew


def descents(
    simulator: Simulator, objective: Objective, seed: int, given: Schedule | None = None
) -> Iterator[tuple[Rules, float]]:
    """Yields rules and the length (ms) that they lead to, `NEVER` if that is too long to matter: descents from one
    start after the other, the best first. Ends if no start leads to a schedule."""
    random = Random(seed)
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
