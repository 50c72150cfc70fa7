"""The best schedule of an engine: from the warm start on, each better one is checked, kept and emitted."""

from __future__ import annotations

from collections.abc import Callable

from optpipe.errors import InputError
from optpipe.evaluate.objective import NO_SCHEDULE_MS, length_ms, shorter
from optpipe.process.protocol import Frame, Incumbent, Programs, Request
from optpipe.schedule import Schedule, check
from optpipe_solver.schedule_facts import has_only_known_ops


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
        self.value = NO_SCHEDULE_MS
        warm = self._warm_start(request.warm_start) if request.warm_start else None
        if warm is not None:
            self.schedule, self.value = warm, length_ms(warm, request.objective)

    def _warm_start(self, programs: Programs) -> Schedule | None:
        try:
            schedule = programs.schedule(self.request.problem)
        except InputError:
            return None
        return schedule if has_only_known_ops(schedule) and not check(self.request.problem, schedule) else None

    def offer(self, schedule: Schedule) -> bool:
        """Keep and emit a schedule that is valid and better than all before. Returns whether it is."""
        length = length_ms(schedule, self.request.objective)
        if not shorter(length, self.value) or check(self.request.problem, schedule):
            return False
        self.schedule, self.value = schedule, length
        self._emit(Incumbent(method=schedule.method, schedule=Programs.from_schedule(schedule)))
        return True
