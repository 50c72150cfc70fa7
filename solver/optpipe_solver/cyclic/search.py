"""The engine: patterns first, the shortest period there is and some longer ones, then windows of the best schedule until time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from math import ceil

from optpipe.child import Bound, Frame, Incumbent, Programs, Request
from optpipe.errors import InputError
from optpipe.schedule import Schedule
from optpipe.validity import check
from optpipe_solver.cyclic.pattern import Pattern, PatternModel, least_period, sequential_period
from optpipe_solver.cyclic.ticks import Ticks
from optpipe_solver.cyclic.timed import covers, split, timed
from optpipe_solver.cyclic.unroll import prune, unroll
from optpipe_solver.cyclic.whole import Starts, WindowModel
from optpipe_solver.cyclic.window import everything, finish, windows

LARGEST_K = 4
SMALL = 200  # forwards: so few, and the whole problem is tried at once
WHOLE_SHARE = 0.5  # of the time that is left then
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

    def whole(self, ticks: Ticks, schedule: Schedule) -> Schedule:
        """Solves the whole problem from `schedule` on, for a part of the time left; returns the best. Tells the bound where it is one."""
        known, found = timed(ticks, schedule), [schedule]

        def on_better(starts: Starts) -> None:
            found.append(finish(ticks, starts))
            self.offer(found[-1])

        model = WindowModel(ticks, known, everything(known), in_order=True)
        answer = model.solve(max(0.0, WHOLE_SHARE * self.left()), self.request.threads, self.request.seed, on_better)
        if self.request.objective == "makespan" and bounds_all(ticks):
            self._emit(Bound(method="cyclic", lower_bound_ms=ticks.ms(answer.bound)))
        return min(found, key=lambda s: s.makespan_ms)

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
    until = time.monotonic() + PATTERNS_SHARE * request.time_limit_s
    for K in range(1, min(LARGEST_K, request.problem.microbatches) + 1):
        shortest = None
        for pattern in patterns(ticks, K, until, request.threads, request.seed):
            shortest = shortest or pattern
            search.offer(prune(unroll(ticks, pattern, "cyclic")))
        if shortest and shortest.period == least_period(ticks, K):
            break  # more micro-batches could not repeat in less
    schedule = split(search.best) if search.best else None
    if schedule and covers(schedule) and not check(request.problem, schedule):
        if len(request.problem.stages) * request.problem.microbatches <= SMALL:
            schedule = search.whole(ticks, schedule)
        for better in windows(ticks, schedule, search.deadline, request.threads, request.seed):
            search.offer(better)


def bounds_all(ticks: Ticks) -> bool:
    """Whether the whole model knows every choice that the problem leaves, so that its bound holds for every schedule.

    Micro-batches may be taken in order only where none leaves: with offloads, a later one can be worth an overtaking.
    """
    problem = ticks.problem
    fused_needs_less = any(stage.weight_grad_bytes > stage.activation_bytes for stage in problem.stages)
    choices = any(stage.can_recompute or stage.can_offload for stage in problem.stages) or problem.overlap_factor is not None
    return ticks.exact and ticks.exact_sizes and not choices and not fused_needs_less


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
