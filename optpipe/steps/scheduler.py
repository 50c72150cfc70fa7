"""`StepScheduler`: a certified schedule for each step's own micro-batches, soon, and a better one until it begins.

A first answer takes a counted amount of search and no clock: all ranks that ask for one step compute the same one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np

from optpipe.dispatch.descents import SearchProgress, descents, moved_rules, rules_of_schedule
from optpipe.dispatch.simulate import Simulator
from optpipe.errors import InputError, ScheduleError
from optpipe.evaluate.jit import compile_at_once
from optpipe.evaluate.objective import NO_SCHEDULE_MS, shorter
from optpipe.model.problem import Problem
from optpipe.process.background import be_nicer
from optpipe.schedule import Schedule, check
from optpipe.steps.assign import assign, plain_rules, require_room
from optpipe.steps.cost_model import CostModel, StepRules

METHOD = "step"
FIRST_TRIES, FIRST_OPS = 1200, 15_000  # rules tried for a first answer; ops of further tries, where each has few
RACE_SHARE = 0.8  # of them for a race of the best first rules
LONGEST_SEARCH_S = 60.0  # after that a search that nobody has ended ends by itself


class PlannedStep:
    """A step that has a schedule, for which a thread looks for a shorter one until `best` is asked for.

    Attributes
    ----------
    problem
        The step's own: a figure for each micro-batch.
    first
        The first schedule: valid and certified, the same in each process that plans this step from the same starts.
    """

    def __init__(self, problem: Problem, improve: bool, starts: Sequence[StepRules] = ()) -> None:
        self.problem = problem
        require_room(problem)
        self._simulator = Simulator(problem)
        self._best: SearchProgress | None = None
        self._answer: Schedule | None = None
        self._over = threading.Event()
        tries = FIRST_TRIES + FIRST_OPS // self._simulator.ops
        moved = [rules for start in starts if (rules := moved_rules(self._simulator, *start)) is not None]
        self._steps = descents(self._simulator, "makespan", 0, moved, race=int(RACE_SHARE * tries))
        self._search(tries)
        if self._best is None:
            alone = rules_of_schedule(self._simulator, self._plainly())
            self._steps = descents(self._simulator, "makespan", 0, alone)
            self._search(tries)
        self.first = self._schedule()
        self._thread = threading.Thread(target=self._go_on, daemon=True, name="step schedules")
        if improve:
            self._thread.start()

    def best(self) -> Schedule:
        """End the search. Returns the shortest schedule, certified; `first` if none is shorter.

        How far the search came depends on the clock: ranks take the one that one of them has chosen. The thread is not
        waited for: it ends after some ms, and what it has by then is not used.
        """
        self._over.set()
        if self._answer is None:
            better = self._schedule(self.first)
            self._answer = better if shorter(better.makespan_ms, self.first.makespan_ms) else self.first
        return self._answer

    def _plainly(self) -> Schedule:
        """By plain rules, at last one micro-batch at a time, where no rules of a search lead to a schedule."""
        m = self.problem.microbatches
        for rules in plain_rules(self.problem, np.arange(m)):
            schedule = self._simulator.schedule(rules, METHOD)
            if schedule is not None and not check(self.problem, schedule):
                return schedule
        raise ScheduleError(
            f"no order is known in which the {m} micro-batches of this step fit the activation budgets and host memory"
        )

    def _search(self, most_tries: int) -> None:
        """Simulate about this many rules, unless the search is over."""
        tries = 0
        while tries < most_tries and (step := next(self._steps, None)):
            is_better = self._best is None or shorter(step.ms, self._best.ms)
            if not self._over.is_set() and step.ms < NO_SCHEDULE_MS and is_better:
                self._best = step
            tries += step.tried

    def _go_on(self) -> None:
        be_nicer(threading.get_native_id())
        end = time.monotonic() + LONGEST_SEARCH_S
        while not self._over.is_set() and time.monotonic() < end:
            self._search(1)

    def _schedule(self, otherwise: Schedule | None = None) -> Schedule:
        """The schedule of the best rules, if it is valid."""
        assert self._best is not None
        schedule = self._simulator.schedule(self._best.rules, METHOD)
        if schedule is not None and not check(self.problem, schedule):
            return schedule
        if otherwise is not None:
            return otherwise
        raise ScheduleError("the first schedule of this step is not valid: please report its problem file")


class StepScheduler:
    """Schedules steps whose micro-batches differ.

    Parameters
    ----------
    template
        Devices, links and stages as in each step; figures that no step gives are the template's. It has one route.
    costs
        What figures follow from, where steps are given as features of micro-batches.
    """

    def __init__(self, template: Problem, costs: CostModel | None = None) -> None:
        if len(template.all_routes) > 1:
            raise InputError(
                f"routes has {len(template.all_routes)} entries: a schedule for every step is made for stages on one "
                "route; optpipe.solve schedules several"
            )
        self.template, self.costs = template, costs

    def prepare(self) -> None:
        """Compile what schedules and assigns: some seconds the first time on a machine, later a moment."""
        compile_at_once()
        PlannedStep(self.template, improve=False)
        assign(self.template, 1)

    def plan(
        self, step: Problem | Sequence[Mapping[str, float]], improve: bool = True, starts: Sequence[StepRules] = ()
    ) -> PlannedStep:
        """A first schedule of a step; a thread then looks for shorter ones.

        Parameters
        ----------
        step
            The features of each micro-batch; or the template with the step's own number of micro-batches and figures.
        improve
            Whether the search goes on after the first schedule, on one core.
        starts
            Rules of other steps on these stages, from which the search starts, too.

        Raises
        ------
        InputError
            If the step does not match the template, or a feature is missing.
        StepMemoryError
            If a micro-batch does not fit by itself; it names the micro-batch.
        ScheduleError
            If no schedule is found for another reason.
        """
        if not isinstance(step, Problem):
            if self.costs is None:
                raise InputError("costs is missing: a step that is given by features needs a cost model")
            step = self.costs.problem(self.template, step)
        devices = [stage.device for stage in self.template.stages]
        if [stage.device for stage in step.stages] != devices or step.all_routes != self.template.all_routes:
            raise InputError("stages: a step has the stages of its template, on the same devices")
        return PlannedStep(step, improve, starts)
