"""The best schedule of an engine: from the warm start on, each better one is checked, kept and emitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from optpipe.errors import InputError
from optpipe.evaluate.objective import NEVER, length_ms, shorter
from optpipe.process.protocol import Frame, Incumbent, Programs, Request
from optpipe.schedule import Schedule, check
from optpipe_solver.cpsat.grid_schedule import is_expressible, split_dispensable
from optpipe_solver.heuristics import generate
from optpipe_solver.methods import HEURISTICS
from optpipe_solver.paths import has_only_known_ops


class BestSchedule:
    """The best schedule so far.

    Attributes
    ----------
    schedule
        The best. At first the warm start, if it is valid for this problem and the models know its ops.
    value
        Its length in ms, infinity where there is none.
    """

    def __init__(self, request: Request, emit: Callable[[Frame], None]) -> None:
        self.request, self._emit = request, emit
        self.schedule: Schedule | None = None
        self.value = NEVER
        warm = self._warm_start(request.warm_start) if request.warm_start else None
        if warm is not None:
            self.schedule, self.value = warm, length_ms(warm, request.objective)

    def _warm_start(self, programs: Programs) -> Schedule | None:
        try:
            schedule = programs.schedule(self.request.problem, "")
        except InputError:
            return None
        return schedule if has_only_known_ops(schedule) and not check(self.request.problem, schedule) else None

    def offer(self, schedule: Schedule) -> bool:
        """Keeps and emits a schedule that is valid and better than all before. Says whether it is."""
        found = length_ms(schedule, self.request.objective)
        if not shorter(found, self.value) or check(self.request.problem, schedule):
            return False
        self.schedule, self.value = schedule, found
        self._emit(Incumbent(method=schedule.method, schedule=Programs.of(schedule)))
        return True


class BestGridSchedule(BestSchedule):
    """The best schedule of an engine whose models work on a grid.

    Attributes
    ----------
    start
        The latest that the models can express (no pairs, no needless BW), which need not be the best.
    """

    def __init__(self, request: Request, emit: Callable[[Frame], None]) -> None:
        super().__init__(request, emit)
        self.start: Schedule | None = None
        if self.schedule is not None:
            self._start_from(split_dispensable(self.schedule))

    def ensure_start(self) -> None:
        """Runs heuristics until there is something to start from."""
        problem = self.request.problem
        unpaired = problem.model_copy(update={"overlap_factor": None})  # the models know no pairs
        for name in reversed(HEURISTICS):
            if self.start is None:
                schedule = generate(name, unpaired, self.request.objective)
                self.offer(split_dispensable(replace(schedule, problem=problem)))

    def offer(self, schedule: Schedule) -> bool:
        better = super().offer(schedule)
        if better and is_expressible(schedule):
            self.start = schedule
        elif self.start is None:
            self._start_from(schedule)
        return better

    def _start_from(self, schedule: Schedule) -> None:
        if is_expressible(schedule) and not check(self.request.problem, schedule):
            self.start = schedule
