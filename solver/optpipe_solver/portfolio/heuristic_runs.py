"""`HeuristicRuns`: the heuristics and published systems of one search, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from math import inf

from optpipe.errors import OptPipeError
from optpipe.evaluate.objective import NO_SCHEDULE_MS
from optpipe.formats.stacks import STACKS
from optpipe.model.problem import Problem
from optpipe.process.protocol import Note, Request
from optpipe.reuse import MOST_SIMULATED, RulesSearch
from optpipe.schedule import Schedule
from optpipe_solver import tuning
from optpipe_solver.clock import Clock
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.incumbents import Emit, Incumbents
from optpipe_solver.methods import ENGINES
from optpipe_solver.systems import in_entry_orders, variants


def count_ops(problem: Problem) -> int:
    """How many compute ops a schedule of the problem has."""
    return 3 * len(problem.stages) * problem.microbatches


def is_small(problem: Problem) -> bool:
    """Whether all published schedules are there in a moment."""
    return count_ops(problem) <= tuning.SMALL_OPS


class HeuristicRuns:
    """Offers the schedules of heuristics and published systems to the search's keeper.

    Parameters
    ----------
    system
        The schedule of the published system that the request names; None if it names another method.
    """

    def __init__(
        self, request: Request, system: Schedule | None, incumbents: Incumbents, clock: Clock, emit: Emit
    ) -> None:
        self._request, self._system, self._incumbents = request, system, incumbents
        self._clock, self._emit, self._stack = clock, emit, STACKS[request.stack]
        self._ops = count_ops(request.problem)  # handled for one schedule
        self._published = self.published() if request.method in ("auto", *ENGINES) else iter(())

    def begin(self) -> None:
        """Offer what takes a moment: the published systems for these stages, of a large problem the first that fits,
        then, if none does, one micro-batch at a time. Nothing, if the request names another method."""
        are_all = is_small(self._request.problem)
        for _ in self._published:
            if not are_all and (self._incumbents.best is not None or self._is_half_over):
                break
        tries_any = self._request.method in ("auto", *ENGINES) and not self._stack.only_own
        if tries_any and self._incumbents.best is None:
            self._next("naive", STREAMS["naive"](self._request.problem, self._request.objective))

    def run(
        self, share: float, are_alone: Callable[[], bool] = lambda: False, name: str | None = None
    ) -> Iterator[None]:
        """Offer the schedules of a heuristic for a share of the time, by the clock also while they still gain or are
        alone; yield after each. By default it is what the request names, or `tuning.HEURISTIC`.

        After the first one come the published systems that were not tried, unless that takes half of the time. It is
        not over before there is any schedule, and one of this heuristic. A stack that runs only its own schedules gets
        all of these, and nothing else.
        """
        if self._stack.only_own and self._system is None:
            yield from self._published
            if self._incumbents.best is None:
                names = ", ".join(self._stack.own)
                self._emit(Note(text=f"{self._request.stack} runs {names} only, none of which fits these stages"))
            return
        request, clock, incumbents = self._request, self._clock.share(share), self._incumbents
        name = name or (tuning.HEURISTIC if request.method in ("auto", *ENGINES) else request.method)
        system = iter([self._system]) if self._system else None
        stream = system or STREAMS[name](request.problem, request.objective, self._clock)
        while True:
            best_ms = incumbents.best_ms
            schedule = self._next(name, stream)
            clock.count(self._ops)
            if incumbents.best_ms < best_ms:
                clock.last(tuning.STILL_GAINING * clock.passed_s)
            yield
            while not self._is_half_over and next(self._published, True) is None:
                clock.count(self._ops)
                yield
            is_over = incumbents.best is not None and clock.over and (clock.counts or not are_alone())
            if schedule is None or is_over:
                return

    @property
    def _is_half_over(self) -> bool:
        return self._clock.wall_left_s < self._clock.seconds / 2

    def _next(self, name: str, stream: Iterator[Schedule]) -> Schedule | None:
        """Offer the next schedule of a heuristic, and return it; None if it has no more, or none that is valid."""
        try:
            schedule = next(stream, None)
            wrong = self._incumbents.offer(schedule) if schedule else None
        except OptPipeError as error:
            schedule, wrong = None, str(error)
        except Exception as error:  # one heuristic's fault does not end the search
            schedule, wrong = None, f"{type(error).__name__}: {error}"
        if wrong:
            self._emit(Note(text=f"{name} gives no schedule: {wrong}"))
        return None if wrong else schedule

    def by_rules(self, most: int = MOST_SIMULATED, until: float = inf) -> float:
        """Offer what a compiled list scheduler finds by rules when so many ops are simulated in all, by default in some
        50 ms, or at a moment of `time.monotonic`. Returns how long that is."""
        if self._stack.only_own:
            return NO_SCHEDULE_MS

        def shortest() -> Iterator[Schedule]:
            if schedule := self._rules_search.go_on(most, until):
                yield schedule

        self._next("dispatch", shortest())
        return self._rules_search.ms

    @cached_property
    def _rules_search(self) -> RulesSearch:
        return RulesSearch(self._request.problem, None, self._request.objective)

    def published(self) -> Iterator[None]:
        """Offer each published system for these stages once, so that none that fits is better than the answer.

        A system that does not fit or does not apply to the problem is passed over in silence.
        """
        for method in variants(self._request.problem):
            self.offer_published(method)
            yield

    def offer_published(self, method: str) -> None:
        """Offer a published system in every order in which micro-batches may enter, unless that was done before."""
        if method in self._incumbents.tried or not self._stack.makes(method):
            return
        self._incumbents.tried.add(method)
        try:
            for schedule in in_entry_orders(method, self._request.problem):
                self._incumbents.offer(schedule)
        except OptPipeError:
            pass
        except Exception as error:  # as above
            self._emit(Note(text=f"{method} gives no schedule: {type(error).__name__}: {error}"))
