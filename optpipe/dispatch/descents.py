"""Search in rules: from rules by memory, one change after the other (Storer, Wu and Vaccari 1992).

They call it search in heuristic space: not the order of ops is changed but the rules of a list scheduler that makes it.
So the space is as large as the pipeline is deep, however many micro-batches there are, and one change acts on all of
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optpipe.dispatch.figures import in_rows
from optpipe.dispatch.simulate import Simulator
from optpipe.dispatch.starts import first_rules
from optpipe.evaluate.jit import plain
from optpipe.evaluate.objective import NO_SCHEDULE_MS, Objective
from optpipe.model.rules import Rules

if TYPE_CHECKING:
    from optpipe.dispatch.state import State

MOST_FAILURES = 1500  # changes in a row without a shorter schedule, after which the search starts anew
AT_A_TIME = 100  # most changes before the caller is asked whether to go on
OPS_AT_A_TIME = 20_000  # about the most simulated ops before that
HEATS = (8, 4, 2, 1)  # how many starts race in each
LOOPS = tuple(f"optpipe.dispatch.{loop}" for loop in ("clock:list_ops", "clock:listed_ms", "descend:descend"))


class Step(NamedTuple):
    """A step of a search in rules.

    Attributes
    ----------
    rules
        The best ones of this descent.
    ms
        The length that they lead to; `NO_SCHEDULE_MS` where they lead to no schedule.
    tried
        How many rules were simulated since the last step.
    listed
        The list of a schedule by the rules, until the next step; None where other rules were simulated after them.
    """

    rules: Rules
    ms: float
    tried: int
    listed: State | None = None


def descents(
    simulator: Simulator, objective: Objective, seed: int, given_rules: Iterable[Rules] = (), race: int = 0
) -> Iterator[Step]:
    """Yields steps of descents from one start after the other, the best first: `given_rules`,
    and `first_rules`. Ends if no start leads to a schedule.

    Before that the best starts share `race` tries: after each quarter of them the better half goes on (successive
    halving, Karnin, Koren and Somekh 2013).
    """
    random, state = np.random.default_rng(seed), simulator.new_state()
    starts: list[tuple[float, int, Rules]] = []
    for n, rules in enumerate(chain(given_rules, first_rules(simulator))):
        ms = simulator.length_ms(rules, objective, state)
        yield Step(rules, ms, 1, state if ms < NO_SCHEDULE_MS else None)
        if ms < NO_SCHEDULE_MS:
            starts.append((ms, n, rules))
    starts.sort()
    different = list({ms: rules for ms, _, rules in starts}.items())[: HEATS[0]] if race else []
    racing = [_Descent(simulator, state, objective, rules, ms, random) for ms, rules in different]
    for left in HEATS:
        racing = sorted(racing, key=lambda descent: descent.ms)[:left]
        for descent in racing:
            yield descent.go_on(race // len(HEATS) // len(racing))
    for descent in racing:
        yield from descent
    while starts:
        for ms, _, rules in starts:
            yield from _Descent(simulator, state, objective, rules, ms, random)


class _Descent:
    """Changes of rules, one after the other, that begin with some rules. `state` is room, shared with others."""

    def __init__(
        self,
        simulator: Simulator,
        state: State,
        objective: Objective,
        rules: Rules,
        ms: float,
        random: np.random.Generator,
    ) -> None:
        from optpipe.dispatch.descend import MODULUS  # imports numba

        self._simulator, self._objective, self._state = simulator, objective, state
        self._at_hand, self._best, self._trial = (in_rows(rules).copy() for _ in range(3))
        self._progress = np.array([ms, ms, 0.0, random.integers(1, int(MODULUS))])

    @property
    def ms(self) -> float:
        """Of the best rules."""
        from optpipe.dispatch.descend import SHORTEST

        return float(self._progress[SHORTEST])

    def go_on(self, tries: int) -> Step:
        from optpipe.dispatch.descend import descend

        simulator, span = self._simulator, self._objective == "span"
        rules = self._at_hand, self._best, self._trial
        search = descend if simulator.is_compiled else plain(descend)
        search(simulator.figures, simulator.choices, *rules, self._state, self._progress, tries, span)
        return Step(self._best.copy(), self.ms, tries)

    def __iter__(self) -> Iterator[Step]:
        """Yields the best rules after each few changes, until many in a row have led to nothing shorter."""
        from optpipe.dispatch.descend import FAILURES

        simulator = self._simulator
        tries = min(AT_A_TIME, max(1, OPS_AT_A_TIME // simulator.ops)) if simulator.is_compiled else 1
        while self._progress[FAILURES] < MOST_FAILURES:
            yield self.go_on(tries)


def compile_descents(simulator: Simulator) -> None:
    """Compile what descents take: some seconds the first time on a machine, later a moment."""
    from optpipe.dispatch.descend import descend

    rules = next(first_rules(simulator))
    simulator.length_ms(rules, "makespan")
    at_hand, best, trial = (in_rows(rules).copy() for _ in range(3))
    progress = np.zeros(4)
    descend(simulator.figures, simulator.choices, at_hand, best, trial, simulator.new_state(), progress, 0, False)
