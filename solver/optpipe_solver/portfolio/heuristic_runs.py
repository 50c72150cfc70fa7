"""`HeuristicRuns`: the heuristics of one search, in this process, one schedule of each per round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import count
from math import inf

from optpipe.errors import OptPipeError
from optpipe.evaluate.objective import NO_SCHEDULE_MS, length_ms
from optpipe.process.protocol import Note, Request
from optpipe.reuse import MOST_SIMULATED, RulesSearch
from optpipe.schedule import Schedule
from optpipe_solver import tuning
from optpipe_solver.clock import Clock
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.incumbents import Emit, Incumbents
from optpipe_solver.methods import ENGINES, HEURISTICS
from optpipe_solver.systems import in_entry_orders, variants

Streams = dict[str, Iterator[Schedule]]


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
        self._clock, self._emit = clock, emit
        self._ops = 3 * len(request.problem.stages) * request.problem.microbatches  # handled for one schedule

    def streams(self) -> Streams:
        """The schedules of what the request names, a heuristic or a system; else of `tuning.HEURISTICS`.

        The most promising comes first. Where list scheduling takes its time `naive`, which takes none, does.
        """
        request, problem = self._request, self._request.problem
        if self._system:
            return {request.method: iter([self._system])}
        names = [request.method] if request.method in HEURISTICS else list(tuning.HEURISTICS)
        if sum(stage.offload_parts for stage in problem.stages) * problem.microbatches > tuning.LARGE_PARTS:
            names.sort(key=lambda name: name != "naive")
        return {name: STREAMS[name](problem, request.objective, self._clock) for name in names}

    def run(self, streams: Streams, share: float, are_alone: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Offer schedules for a share of the time, by the clock also while they still gain or are alone; yield after
        each.

        Heuristics come in rounds, a schedule of each. After the first round come the published systems, unless that
        takes half of the time; where devices have several stages, for which there are few and good ones, after the
        first schedule. A heuristic whose best is not the best of all runs in some of the rounds only.

        It is not over before there is any schedule, and one of these heuristics.
        """
        clock, incumbents, tried = self._clock.share(share), self._incumbents, False
        chunked = len(self._request.problem.stages) > len(self._request.problem.devices)
        shortest_ms = dict.fromkeys(streams, NO_SCHEDULE_MS)

        def in_half_the_time() -> Iterator[None]:
            for _ in self.published() if self._request.method in ("auto", *ENGINES) else ():
                clock.count(self._ops)
                yield
                if self._clock.wall_left_s < self._clock.seconds / 2:
                    return

        def is_over() -> bool:
            return tried and incumbents.best is not None and clock.over and (clock.counts or not are_alone())

        published = in_half_the_time()
        for number in count():
            ahead_ms = min((shortest_ms[name] for name in streams), default=0.0)
            is_full_round = number % tuning.ALL_EVERY_ROUNDS == 0
            for name in [name for name in streams if is_full_round or shortest_ms[name] <= ahead_ms]:
                if is_over():
                    break
                best_ms = incumbents.best_ms
                schedule = self._next(name, streams[name])
                tried = True
                clock.count(self._ops)
                if incumbents.best_ms < best_ms:
                    clock.last(tuning.STILL_GAINING * clock.passed_s)
                if schedule is None:
                    del streams[name]
                else:
                    shortest_ms[name] = min(shortest_ms[name], length_ms(schedule, self._request.objective))
                yield
                if chunked:
                    yield from published
            yield from published
            if is_over() or not streams:
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
            try:
                for schedule in in_entry_orders(method, self._request.problem):
                    self._incumbents.offer(schedule)
            except OptPipeError:
                pass
            except Exception as error:  # as above
                self._emit(Note(text=f"{method} gives no schedule: {type(error).__name__}: {error}"))
            yield
