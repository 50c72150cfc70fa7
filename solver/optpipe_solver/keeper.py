"""`Keeper`: the best schedule of an engine that works on times, and who is told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from optpipe.child import Frame, Incumbent, Programs, Request
from optpipe.errors import InputError
from optpipe.schedule import Schedule
from optpipe.validity import check
from optpipe_solver.cpsat.timed import covers, split
from optpipe_solver.heuristics import generate, value
from optpipe_solver.methods import WITHIN_MEMORY


class Keeper:
    """`value` is what is to be beaten, `start` the best schedule that the models of CP-SAT know (no pairs, no needless BW)."""

    def __init__(self, request: Request, emit: Callable[[Frame], None]) -> None:
        self.request, self._emit = request, emit
        self.start: Schedule | None = None
        self.value = float("inf")
        if request.warm_start is not None:
            self._begin_with(request.warm_start)

    def _begin_with(self, programs: Programs) -> None:
        """One that does not hold for these costs is nothing."""
        try:
            schedule = programs.schedule(self.request.problem, "")
        except InputError:
            return
        if not check(self.request.problem, schedule):
            self.value = value(schedule, self.request.objective)
            self._keep(split(schedule))

    def heuristic(self) -> None:
        """Where there is nothing to start from yet, takes what a heuristic finds."""
        problem = self.request.problem
        alone = problem.model_copy(update={"overlap_factor": None})  # the models know no pairs
        for name in WITHIN_MEMORY:
            if self.start is None:
                self.offer(split(replace(generate(name, alone, self.request.objective), problem=problem)))

    def offer(self, schedule: Schedule) -> bool:
        """Keeps the schedule if there is none yet or it is better, tells it if it is better than all before, and holds. Says if it is."""
        found = value(schedule, self.request.objective)
        better = found < self.value * (1 - 1e-9)
        if (better or self.start is None) and not check(self.request.problem, schedule):
            self._keep(schedule)
            if better:
                self.value = found
                self._emit(Incumbent(method=schedule.method, schedule=Programs.of(schedule)))
                return True
        return False

    def _keep(self, schedule: Schedule) -> None:
        if covers(schedule) and not check(self.request.problem, schedule):
            self.start = schedule
