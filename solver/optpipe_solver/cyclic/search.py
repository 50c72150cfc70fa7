"""The engine: patterns first, the shortest period there is and some longer ones; then warm-up and cool-down solved together, with the
periods put in between; then windows of the best schedule until time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil

from optpipe.child import Bound, Frame, Incumbent, Programs, Request
from optpipe.errors import InputError
from optpipe.schedule import Schedule
from optpipe.validity import check
from optpipe_solver.cpsat.ticks import Ticks
from optpipe_solver.cpsat.timed import covers, split, timed
from optpipe_solver.cpsat.whole import Starts, WindowModel
from optpipe_solver.cyclic.pattern import Pattern, PatternModel, least_period, sequential_period
from optpipe_solver.cyclic.unroll import repeat_within, unroll
from optpipe_solver.lns.windows import everything, finish, windows
from optpipe_solver.prune import prune

LARGEST_K = 4
SMALL = 600  # forwards: so few, and warm-up and cool-down are solved at once
WHOLE_SHARE = 0.6  # of the time that is left then
PATTERNS_SHARE = 0.4  # of the time, at most
PERIOD_S = 10.0  # for one period, at most
STRETCHES = (1.02, 1.05, 1.1, 1.2, 1.35)  # of the shortest period: a longer one may have so much less latency that it pays


class Search:
    """What is best so far, and who is told."""

    def __init__(self, request: Request, emit: Callable[[Frame], None]) -> None:
        self.request, self._emit = request, emit
        self.best: Schedule | None = None
        self.value = float("inf")
        self.deadline = time.monotonic() + request.time_limit_s
        if request.warm_start is not None:
            self._begin_with(request.warm_start)

    def _begin_with(self, programs: Programs) -> None:
        """The request's own schedule is what is to be beaten; one that does not hold for these costs is nothing."""
        try:
            schedule = programs.schedule(self.request.problem, "")
        except InputError:
            return
        if not check(self.request.problem, schedule):
            self.best, self.value = schedule, self._of(schedule)

    def _of(self, schedule: Schedule) -> float:
        return schedule.makespan_ms if self.request.objective == "makespan" else schedule.span_ms

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def patterns(self, ticks: Ticks) -> Pattern | None:
        """Offers what the patterns unroll to; returns the one that gave the shortest schedule."""
        request = self.request
        chosen: list[tuple[float, int, Pattern]] = []
        until = time.monotonic() + PATTERNS_SHARE * request.time_limit_s
        for K in range(1, min(LARGEST_K, request.problem.microbatches) + 1):
            shortest = None
            for pattern in patterns(ticks, K, until, request.threads, request.seed):
                schedule = prune(unroll(ticks, pattern, "cyclic"))
                self.offer(schedule)
                chosen.append((schedule.makespan_ms, len(chosen), pattern))
                shortest = shortest or pattern
            if shortest and shortest.period == least_period(ticks, K):
                break  # more micro-batches could not repeat in less
        return min(chosen)[2] if chosen else None

    def ramps(self, ticks: Ticks, pattern: Pattern) -> None:
        """Solves the problem of just so many micro-batches that warm-up and cool-down meet, for a part of the time left, and puts the
        periods between them into each solution. Where that is the whole problem, tells the bound if it is one."""
        problem, K = ticks.problem, pattern.microbatches
        most = problem.microbatches
        few = 2 * K * -(-pattern.latency // pattern.period)
        few = min(most, few + (most - few) % K)
        if few * len(problem.stages) > SMALL:
            return
        core = replace(ticks, problem=problem.model_copy(update={"microbatches": few, "microbatch_routes": None}))
        start = prune(unroll(core, pattern, "cyclic"))
        if few == most and self.best and self.best.makespan_ms < start.makespan_ms and _modelled(split(self.best)):
            start = split(self.best)
        best = [start.makespan_ms]

        def on_better(starts: Starts) -> None:
            short = finish(core, starts)
            if short.makespan_ms < best[0] * (1 - 1e-9):
                best[0] = short.makespan_ms
                longer = repeat_within(ticks, pattern, short)
                if longer:
                    self.offer(prune(longer))

        known = timed(core, start)
        model = WindowModel(core, known, everything(known), in_order=True)
        answer = model.solve(max(0.0, WHOLE_SHARE * self.left()), self.request.threads, self.request.seed, on_better)
        if few == most and self.request.objective == "makespan" and model.is_bound:
            self._emit(Bound(method="cyclic", lower_bound_ms=ticks.ms(answer.bound)))

    def offer(self, schedule: Schedule) -> None:
        """Keeps and tells the schedule if it is better and holds."""
        value = self._of(schedule)
        if value < self.value * (1 - 1e-9) and not check(self.request.problem, schedule):
            self.best, self.value = schedule, value
            self._emit(Incumbent(method=schedule.method, schedule=Programs.of(schedule)))


def run(request: Request, emit: Callable[[Frame], None]) -> None:
    """Emits better and better schedules until the request's time is up."""
    search = Search(request, emit)
    ticks = Ticks.of(request.problem)
    pattern = search.patterns(ticks)
    if pattern:
        search.ramps(ticks, pattern)
    schedule = split(search.best) if search.best else None
    if schedule and _modelled(schedule):
        for better in windows(ticks, schedule, search.deadline, request.threads, request.seed):
            search.offer(better)


def _modelled(schedule: Schedule) -> bool:
    """Whether the models here can start from it."""
    return covers(schedule) and not check(schedule.problem, schedule)


def patterns(ticks: Ticks, K: int, until: float, threads: int, seed: int) -> Iterator[Pattern]:
    """Patterns of K micro-batches: the shortest period found before `until` (monotonic clock), then longer ones of less latency."""

    def solve(period: int, below: int | None = None) -> Pattern | None:
        left = until - time.monotonic()
        return PatternModel(ticks, K, period).solve(min(left, PERIOD_S), threads, seed, below).pattern if left > 0 else None

    shortest = _shortest(solve, least_period(ticks, K), sequential_period(ticks, K))
    if shortest is None:
        return
    yield shortest
    latency = shortest.latency
    for period in sorted({ceil(shortest.period * stretch) for stretch in STRETCHES} - {shortest.period}):
        pattern = solve(period, latency)
        if pattern:
            yield pattern
            latency = pattern.latency


def _shortest(solve: Callable[[int], Pattern | None], least: int, most: int) -> Pattern | None:
    """The pattern of the shortest period: `least` if it may be, otherwise by steps that double, then halving what is left between."""
    low, high, step = least - 1, least, max(1, least // 16)
    while (best := solve(high)) is None:
        if high >= most:
            return None
        low, high, step = high, min(most, high + step), 2 * step
    while high - low > max(1, high // 200):
        middle = (low + high) // 2
        pattern = solve(middle)
        if pattern:
            best, high = pattern, middle
        else:
            low = middle
    return best
