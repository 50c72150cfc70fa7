"""`HeuristicRuns`: the heuristics and published systems of one search, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from math import inf

from optpipe.errors import OptPipeError
from optpipe.evaluate.objective import NO_SCHEDULE_MS
from optpipe.formats.stacks import STACKS
from optpipe.model.problem import Problem
from optpipe.process.protocol import Note, Request
from optpipe.reuse import MOST_SIMULATED, RulesSearch
from optpipe.schedule import Schedule
from optpipe_solver import anneal, tuning
from optpipe_solver.anneal import Annealing
from optpipe_solver.clock import Clock, FirstClock
from optpipe_solver.cpsat.grid import split_dispensable
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.incumbents import Emit, Incumbents, Predicate
from optpipe_solver.systems import fitting, variants


def count_ops(problem: Problem) -> int:
    """How many compute ops a schedule of the problem has."""
    return 3 * len(problem.stages) * problem.microbatches


class HeuristicRuns:
    """Offers the schedules of heuristics and published systems to the search's keeper; `system` is of the one that is
    asked for."""

    def __init__(
        self, request: Request, system: Schedule | None, incumbents: Incumbents, clock: Clock, emit: Emit
    ) -> None:
        self._request, self._system, self._incumbents = request, system, incumbents
        self._clock, self._emit, self._stack = clock, emit, STACKS[request.stack]
        self._ops = count_ops(request.problem)  # handled for one schedule

    def begin(self) -> None:
        """Offer the published systems for these stages, as many as a moment allows, then, if none fits, one micro-batch
        at a time. Nothing, if the request names another method."""
        request = self._request
        if not request.starts_from_known:
            return
        for _ in self.published(variants(request.problem), FirstClock(request.time_limit_s)):
            pass
        if self._incumbents.best is None and not self._stack.only_own:
            self._next("naive", STREAMS["naive"](request.problem, request.objective))

    def run(
        self, share: float, are_alone: Callable[[], bool] = lambda: False, name: str | None = None
    ) -> Iterator[None]:
        """Offer the schedules of a heuristic for a share of the time, by the clock also while they still gain or are
        alone; yield after each. By default it is what the request names, or `tuning.HEURISTIC`.

        After the first one come the published systems that were not tried, unless that takes half of the time. It is
        not over before there is any schedule, and one of this heuristic. A stack that runs only its own schedules gets
        all of these, and nothing else.
        """
        request, clock, incumbents = self._request, self._clock.share(share), self._incumbents
        only_own = self._stack.only_own and self._system is None
        methods = variants(request.problem) if request.starts_from_known else ()
        published = self.published(methods, self._clock if only_own else self._clock.until_half())
        if only_own:
            yield from published
            if incumbents.best is None and not self._clock.over:
                names = ", ".join(self._stack.own)
                self._emit(Note(text=f"{request.stack} runs {names} only, none of which fits these stages"))
            return
        name = name or (tuning.HEURISTIC if request.starts_from_known else request.method)
        system = iter([self._system]) if self._system else None
        stream = system or STREAMS[name](request.problem, request.objective, self._clock)
        while True:
            best_ms = incumbents.best_ms
            schedule = self._next(name, stream)
            clock.count(self._ops)
            if incumbents.best_ms < best_ms:
                clock.last(tuning.STILL_GAINING * clock.passed_s)
            yield
            for _ in published:
                clock.count(self._ops)
                yield
            is_over = incumbents.best is not None and clock.over and (clock.counts or not are_alone())
            if schedule is None or is_over:
                return

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

    def by_annealing(self, seconds: float, kind: Predicate, nth: int) -> None:
        """Offer what the loops of the engine `anneal`, which must support the problem, make of the best schedule of a
        kind of the keeper's; the `nth` such run has a seed of its own."""
        start = self._incumbents.best_of(kind)
        if start is None:
            return
        annealing = Annealing(split_dispensable(start), self._request.objective, self._request.seed + nth)
        stream = annealing.improvements(Clock(seconds, self._clock.counts))
        while self._next(anneal.METHOD, stream):
            pass

    @cached_property
    def _rules_search(self) -> RulesSearch:
        return RulesSearch(self._request.problem, None, self._request.objective)

    def published(self, methods: Iterable[str], clock: Clock) -> Iterator[None]:
        """Offer the schedules of published systems that fit, unless all were offered before, until the clock is over,
        so that none is better than the answer; yield after each system."""
        for method in methods:
            if clock.over:
                return
            if method in self._incumbents.tried:
                continue
            try:
                for schedule in fitting([method], self._request.problem, "keep", clock, self._request.stack):
                    self._incumbents.offer(schedule)
            except Exception as error:  # as above
                self._emit(Note(text=f"{method} gives no schedule: {type(error).__name__}: {error}"))
            if not clock.over:
                self._incumbents.tried.add(method)
            yield
