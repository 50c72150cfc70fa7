"""`SearchState`: the best schedules and the best bound that one search has found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from optpipe.errors import ScheduleError
from optpipe.evaluate.objective import NO_SCHEDULE_MS, length_ms, raises, reaches, shorter
from optpipe.model.program import JOINED
from optpipe.model.rules import Rules
from optpipe.process.protocol import Bound, Frame, Incumbent, Programs, Request
from optpipe.schedule import Schedule, check
from optpipe_solver.methods import ENGINES
from optpipe_solver.schedule_facts import has_only_known_ops
from optpipe_solver.tuning import EngineRun

Emit = Callable[[Frame], None]


class SearchState:
    """What is known so far; each improvement is emitted at once.

    Attributes
    ----------
    best, best_ms
        The incumbent.
    modelled, modelled_ms
        The shortest of those whose ops the models of all engines know: no pairs, no evictions.
    listed, listed_ms
        Of these, the shortest that no engine found: of heuristics, of a published system, or the warm start.
    bound_ms
        No schedule is shorter than this.
    rules
        Of the last best schedule that had any. Those that are better and have none get them.
    """

    def __init__(self, request: Request, emit: Emit) -> None:
        self._problem, self._objective, self._emit = request.problem, request.objective, emit
        self.best: Schedule | None = None
        self.modelled: Schedule | None = None
        self.listed: Schedule | None = None
        self.best_ms = self.modelled_ms = self.listed_ms = NO_SCHEDULE_MS
        self.bound_ms = float("-inf")  # the first bound is emitted, whatever it is
        self.rules: Rules | None = None

    @property
    def proven(self) -> bool:
        """Whether no schedule is shorter."""
        return self.best is not None and reaches(self.best_ms, self.bound_ms)

    def raise_bound(self, lower_bound_ms: float, method: str) -> None:
        """Take a bound that holds for every schedule, if it is higher than those before."""
        if raises(lower_bound_ms, self.bound_ms):
            self.bound_ms = lower_bound_ms
            self._emit(Bound(method=method, lower_bound_ms=lower_bound_ms))

    def contradicts(self, lower_bound_ms: float) -> bool:
        """Whether a schedule is shorter than this claims to be possible."""
        return raises(lower_bound_ms, self.best_ms)

    def offer(self, schedule: Schedule) -> str | None:
        """Take a schedule if it is better than those before and valid.

        This is where schedules are checked, once: those of this process and those that an engine's process sends.

        Returns
        -------
        What is wrong with the schedule; None if nothing is, or if it is no better.
        """
        try:
            ms = length_ms(schedule, self._objective)
        except ScheduleError as error:  # it cannot run
            return str(error)
        best, modelled = shorter(ms, self.best_ms), shorter(ms, self.modelled_ms)
        listed = shorter(ms, self.listed_ms) and not found_by_engine(schedule)
        if (modelled or listed) and not is_modelled(schedule):
            modelled = listed = False
        if not (best or modelled or listed):
            return None
        if wrong := check(self._problem, schedule):
            return wrong[0]
        if schedule.rules is None and self.rules is not None:
            schedule = replace(schedule, rules=self.rules)
        if listed:
            self.listed, self.listed_ms = schedule, ms
        if modelled:
            self.modelled, self.modelled_ms = schedule, ms
        if best:
            self.best, self.best_ms, self.rules = schedule, ms, schedule.rules
            self._emit(Incumbent(method=schedule.method, schedule=Programs.from_schedule(schedule)))
        return None

    def start_for(self, run: EngineRun) -> Schedule | None:
        """The schedule that a run of an engine starts from: the best one that it knows all ops of, or of these the best
        of heuristics."""
        return self.listed if run.from_heuristics else self.modelled


def is_modelled(schedule: Schedule) -> bool:
    """Whether engines' models know all its ops, and none of them run in pairs."""
    return has_only_known_ops(schedule) and not any(program.table[:, JOINED].any() for program in schedule.programs)


def found_by_engine(schedule: Schedule) -> bool:
    return schedule.method in ENGINES
