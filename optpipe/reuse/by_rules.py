"""A schedule by the rules of a list scheduler: those that another schedule seems to follow, then others.

Rules say nothing of single micro-batches and little of memory, so they hold for other problems where an order does not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import inf

from optpipe.dispatch.descents import Step, descents
from optpipe.dispatch.simulate import Simulator
from optpipe.dispatch.starts import rules_of_schedule
from optpipe.evaluate.objective import NO_SCHEDULE_MS, Objective
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.program import JOINED, of_kinds
from optpipe.model.rules import Rules
from optpipe.schedule import Schedule

METHOD = "dispatch"
MOST_SIMULATED = 400_000  # ops: about 60 ms of compiled search, however many devices there are
EACH = 20  # what it costs to change rules, in ops
PER_DEVICE = 1 / 16  # by so much an op costs more for each device, all of which are looked at when one is over
SAID = (Kind.F, Kind.B, Kind.W, Kind.BW, Kind.C, Kind.O, Kind.D, Kind.R)  # by rules


class RulesSearch:
    """A search that can go on, from the rules that a schedule of another problem seems to follow.

    Parameters
    ----------
    schedule
        Of any problem whose stages lie alike on its devices, of which there may be more or fewer; None to begin with
        rules that share memory among stages.

    Attributes
    ----------
    ms
        Length of the shortest schedule found; `NO_SCHEDULE_MS` where rules lead to none or do not say all: they know no
        pairs, no evictions and no updates on the host.
    """

    def __init__(self, problem: Problem, schedule: Schedule | None, objective: Objective) -> None:
        programs = () if schedule is None else schedule.programs
        said = all(of_kinds(each.table, *SAID).all() and not each.table[:, JOINED].any() for each in programs)
        self.ms = NO_SCHEDULE_MS
        self._method = METHOD if schedule is None else schedule.method
        self._best: Rules | None = None
        self._simulator, self._simulated = Simulator(problem), 0
        self._costs = round((self._simulator.ops + EACH) * (1 + PER_DEVICE * len(problem.devices)))  # of a try, in ops
        self._steps: Iterator[Step] = iter(())
        if said and problem.costs.ms.any():
            given = rules_of_schedule(self._simulator, schedule)
            self._steps = descents(self._simulator, objective, 0, given)

    def go_on(self, most: int, until: float = inf) -> Schedule | None:
        """Search until so many ops are simulated in all, of which one counts for more the more devices there are.

        It ends at a moment of `time.monotonic` in any case. Returns the shortest schedule found, if any. Whether it is
        valid, its reader checks.
        """
        while self._simulated <= most and time.monotonic() < until and (step := next(self._steps, None)):
            if step.ms < self.ms:
                self._best, self.ms = step.rules, step.ms
            self._simulated += step.tried * self._costs
        return self._simulator.schedule(self._best, self._method) if self._best else None


def by_rules(
    problem: Problem, schedule: Schedule | None, objective: Objective, most: int = MOST_SIMULATED
) -> Schedule | None:
    """The shortest schedule of a `RulesSearch` that simulates so many ops."""
    return RulesSearch(problem, schedule, objective).go_on(most)
