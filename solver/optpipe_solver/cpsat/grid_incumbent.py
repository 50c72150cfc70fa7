"""The best schedule of an engine whose models work on a grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from optpipe.process.protocol import Frame, Request
from optpipe.schedule import Schedule, check
from optpipe_solver.cpsat.grid_schedule import is_expressible, split_dispensable
from optpipe_solver.heuristics import generate
from optpipe_solver.incumbent import BestSchedule
from optpipe_solver.methods import HEURISTICS


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
