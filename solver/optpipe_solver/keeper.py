"""`Keeper`: the best schedule of an engine, and who is told of it; `TimedKeeper` for those that work on times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from optpipe.errors import InputError
from optpipe.evaluate.objective import length_ms
from optpipe.process.protocol import Frame, Incumbent, Programs, Request
from optpipe.schedule import Schedule, check
from optpipe_solver.cpsat.timed import covers, split
from optpipe_solver.heuristics import generate
from optpipe_solver.methods import HEURISTICS
from optpipe_solver.paths import familiar


class Keeper:
    """`value` is what is to be beaten, `best` the schedule that has it: at first the warm start, if it holds for these
    costs and the models know its ops."""

    def __init__(self, request: Request, emit: Callable[[Frame], None]) -> None:
        self.request, self._emit = request, emit
        self.best: Schedule | None = None
        self.value = float("inf")
        warm = self._warm(request.warm_start) if request.warm_start else None
        if warm is not None:
            self.best, self.value = warm, length_ms(warm, request.objective)

    def _warm(self, programs: Programs) -> Schedule | None:
        try:
            schedule = programs.schedule(self.request.problem, "")
        except InputError:
            return None
        return schedule if familiar(schedule) and not check(self.request.problem, schedule) else None

    def offer(self, schedule: Schedule) -> bool:
        """Keeps and tells the schedule if it is better than all before, and holds. Says if it is."""
        found = length_ms(schedule, self.request.objective)
        if found >= self.value * (1 - 1e-9) or check(self.request.problem, schedule):
            return False
        self.best, self.value = schedule, found
        self._emit(Incumbent(method=schedule.method, schedule=Programs.of(schedule)))
        return True


class TimedKeeper(Keeper):
    """`start` is the best schedule that the models of CP-SAT know (no pairs, no needless BW), which need not be the
    best."""

    def __init__(self, request: Request, emit: Callable[[Frame], None]) -> None:
        super().__init__(request, emit)
        self.start: Schedule | None = None
        if self.best is not None:
            self._keep(split(self.best))

    def heuristic(self) -> None:
        """Where there is nothing to start from yet, takes what a heuristic finds."""
        problem = self.request.problem
        alone = problem.model_copy(update={"overlap_factor": None})  # the models know no pairs
        for name in reversed(HEURISTICS):
            if self.start is None:
                self.offer(split(replace(generate(name, alone, self.request.objective), problem=problem)))

    def offer(self, schedule: Schedule) -> bool:
        better = super().offer(schedule)
        if better or self.start is None:
            self._keep(schedule)
        return better

    def _keep(self, schedule: Schedule) -> None:
        if covers(schedule) and not check(self.request.problem, schedule):
            self.start = schedule
