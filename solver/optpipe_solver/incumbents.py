"""The keeper of a search: its best schedules and its best bound, each improvement verified and emitted at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from optpipe.errors import InputError, ScheduleError
from optpipe.evaluate.objective import NO_SCHEDULE_MS, length_ms, raises, reaches, shorter
from optpipe.formats.stacks import STACKS
from optpipe.process.protocol import Bound, Frame, Incumbent, Programs, Request
from optpipe.results import is_better
from optpipe.schedule import Schedule, check
from optpipe_solver.schedule_facts import has_only_known_ops

Emit = Callable[[Frame], None]
Predicate = Callable[[Schedule], bool]


class _Kept(NamedTuple):
    """The best schedule of a kind."""

    schedule: Schedule | None = None
    ms: float = NO_SCHEDULE_MS


class Incumbents:
    """The best schedule and the best bound of a search. Any thread may offer others.

    `emit` gets each better schedule and each better bound. The best schedule of each of the `kinds` is kept, too. With
    `hands_on_rules` a schedule without rules gets those of the best one. One that the request's training stack cannot
    run is passed over.
    """

    def __init__(self, request: Request, emit: Emit, *kinds: Predicate, hands_on_rules: bool = False) -> None:
        self.problem, self.objective, self._stack = request.problem, request.objective, STACKS[request.stack]
        self._asked = request.method
        self.bound_ms = float("-inf")  # the first bound is emitted, whatever it is
        self.tried: set[str] = set()  # the published schedules that were offered
        self._emit, self._hands_on_rules = emit, hands_on_rules
        self._best, self._best_of = _Kept(), dict.fromkeys(kinds, _Kept())
        self._lock = threading.RLock()

    @classmethod
    def of_engine(
        cls, request: Request, emit: Emit, *kinds: Predicate, known: Predicate = has_only_known_ops
    ) -> Incumbents:
        """The keeper of an engine. It begins with the warm start, unless its ops are not `known`."""
        incumbents = cls(request, emit, *kinds)
        if request.warm_start is not None:
            with suppress(InputError):
                start = request.warm_start.schedule(request.problem)
                if known(start):
                    incumbents.offer(start, is_news=False)
        return incumbents

    @property
    def best(self) -> Schedule | None:
        """The shortest schedule."""
        return self._best.schedule

    @property
    def best_ms(self) -> float:
        """The length of the shortest schedule; `NO_SCHEDULE_MS` without one."""
        return self._best.ms

    def best_of(self, kind: Predicate) -> Schedule | None:
        """The shortest schedule of a kind."""
        return self._best_of[kind].schedule

    @property
    def proven(self) -> bool:
        """Whether no schedule is shorter than the best one."""
        return reaches(self.best_ms, self.bound_ms)

    def contradicts(self, bound_ms: float) -> bool:
        """Whether a schedule is shorter than this claims to be possible."""
        return raises(bound_ms, self.best_ms)

    def raise_bound(self, ms: float, method: str) -> None:
        """Keep a bound that holds for every schedule, if it is higher than those before."""
        with self._lock:
            if raises(ms, self.bound_ms):
                self.bound_ms = ms
                self._emit(Bound(method=method, lower_bound_ms=ms))

    def offer(self, schedule: Schedule, is_news: bool = True) -> str | None:
        """Keep a schedule if it is valid, and shorter than all before (`is_better` of the method asked for) or than
        those of a kind.

        Returns what is wrong with the schedule; None if nothing is, if it is no better, or not for the stack.
        """
        with self._lock:
            try:
                ms = length_ms(schedule, self.objective)
            except ScheduleError as error:  # it cannot run
                return str(error)
            is_best = shorter(ms, self.best_ms) or (
                schedule.method == self._asked
                and is_better(ms, schedule.method, self.best_ms, self.best.method if self.best else "")
            )
            kinds = [kind for kind, best in self._best_of.items() if shorter(ms, best.ms) and kind(schedule)]
            if not (is_best or kinds):
                return None
            if wrong := check(self.problem, schedule):
                return wrong[0]
            if self._stack.complaint(schedule):
                return None
            if self._hands_on_rules and schedule.rules is None and self.best is not None and self.best.rules:
                schedule = replace(schedule, rules=self.best.rules)
            vars(schedule).pop("compiled", None)  # which takes most of its memory
            kept = _Kept(schedule, ms)
            self._best_of |= dict.fromkeys(kinds, kept)
            if is_best:
                self._best = kept
                if is_news:
                    self._emit(Incumbent(method=schedule.method, schedule=Programs.from_schedule(schedule)))
            return None
