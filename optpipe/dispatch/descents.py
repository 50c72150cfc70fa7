"""Search in rules: from rules by memory, one change after the other (Storer, Wu and Vaccari 1992).

They call it search in heuristic space: not the order of ops is changed but the rules of a list scheduler that makes it.
So the space is as large as the pipeline is deep, however many micro-batches there are, and one change acts on all of
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from optpipe.dispatch.simulate import Simulator
from optpipe.dispatch.starts import first_rules
from optpipe.evaluate.objective import NEVER, Objective
from optpipe.model.rules import Rules
from optpipe.schedule import Schedule

MOST_FAILURES = 1500  # changes in a row without a shorter schedule, after which the search starts anew
AT_A_TIME = 100  # changes at most, and
OPS_AT_A_TIME = 20_000  # so many ops that are simulated, before the caller is asked whether to go on


class Step(NamedTuple):
    """What a search in rules has found: the best rules of a descent, the length in ms that they lead to (`NEVER` where
    they lead to no schedule), and how many rules were simulated since the last step."""

    rules: Rules
    ms: float
    tried: int


def descents(simulator: Simulator, objective: Objective, seed: int, given: Schedule | None = None) -> Iterator[Step]:
    """Yields steps of descents from one start after the other, the best first. Ends if no start leads to a schedule."""
    from optpipe.dispatch.descend import FAILURES, MODULUS, SHORTEST, descend  # compiled, so only where it is used

    random, span = np.random.default_rng(seed), objective == "span"
    starts: list[tuple[float, int, Rules]] = []
    for n, rules in enumerate(first_rules(simulator, given)):
        ms = simulator.length_ms(rules, objective)
        yield Step(rules, ms, 1)
        starts.append((ms, n, rules))
    starts = [start for start in sorted(starts) if start[0] < NEVER]
    tries = min(AT_A_TIME, max(1, OPS_AT_A_TIME // simulator.ops))
    while starts:
        for ms, _, rules in starts:
            at_hand, best, trial = rules.copy(), rules.copy(), rules.copy()
            tried = at_hand.arrays, best.arrays, trial.arrays
            state = np.array([ms, ms, 0.0, random.integers(1, int(MODULUS))])
            while state[FAILURES] < MOST_FAILURES:
                descend(*simulator.of_descent, *tried, *simulator.room(), state, tries, span)
                yield Step(best.copy(), float(state[SHORTEST]), tries)


def compile_descents(simulator: Simulator) -> None:
    """Compile what descents take: some seconds the first time on a machine, later a moment."""
    from optpipe.dispatch.descend import descend

    rules = next(first_rules(simulator))
    simulator.length_ms(rules, "makespan")
    tried = (rules.copy().arrays for _ in range(3))
    descend(*simulator.of_descent, *tried, *simulator.room(), np.zeros(4), 0, False)
