"""The engine: patterns first, the shortest period there is and some longer ones; then windows of the best of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil

from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.program import KIND
from optpipe.process.protocol import Frame, Request
from optpipe.schedule import Schedule
from optpipe_solver.budget import Budget
from optpipe_solver.cpsat.ticks import Ticks
from optpipe_solver.cyclic.pattern import Pattern, PatternModel, least_period, sequential_period
from optpipe_solver.cyclic.unroll import unroll
from optpipe_solver.heuristics.periods import lengthened
from optpipe_solver.keeper import TimedKeeper
from optpipe_solver.lift import lift_table
from optpipe_solver.lns.search import improvements
from optpipe_solver.prune import prune

METHOD = "cyclic"
LARGEST_K = 4
WORTHWHILE = 1.5  # so many times fewer micro-batches are improved instead of all
PATTERNS_SHARE = 0.4  # of the time, at most
PERIOD_S = 10.0  # for one period, at most
STRETCHES = (
    1.02,
    1.05,
    1.1,
    1.2,
    1.35,
)  # of the shortest period: a longer one may have so much less latency that it pays


def run(request: Request, emit: Callable[[Frame], None]) -> float | None:
    """Emits better and better schedules until the request's time is up; returns how much of it was used by count."""
    keeper, budget = TimedKeeper(request, emit), Budget(request.time_limit_s, request.threads)
    ticks = Ticks.of(request.problem)
    pattern = _patterns(ticks, keeper, budget)
    if pattern:
        _windows(ticks, pattern, keeper, budget)
    return budget.spent_s


def _patterns(ticks: Ticks, keeper: TimedKeeper, budget: Budget) -> Pattern | None:
    """Offers what the patterns unroll to; returns the one that gave the shortest schedule."""
    chosen: list[tuple[float, int, Pattern]] = []
    least_left = (1 - PATTERNS_SHARE) * budget.left()
    for K in range(1, min(LARGEST_K, ticks.problem.microbatches) + 1):
        shortest = None
        for pattern in patterns(ticks, K, budget, least_left, keeper.request.seed):
            schedule = prune(unroll(ticks, pattern, METHOD))
            keeper.offer(schedule)
            chosen.append((schedule.makespan_ms, len(chosen), pattern))
            shortest = shortest or pattern
        if shortest and shortest.period == least_period(ticks, K):
            break  # more micro-batches could not repeat in less
    return min(chosen)[2] if chosen else None


def _windows(ticks: Ticks, pattern: Pattern, keeper: TimedKeeper, budget: Budget) -> None:
    """Improves what the pattern unrolls to, window by window. Of many micro-batches so few that a period stands between
    warm-up and cool-down; in what becomes of them the period is repeated."""
    problem, K = ticks.problem, pattern.microbatches
    few = 3 * K * ceil(pattern.latency / pattern.period)
    shortened = few * WORTHWHILE < problem.microbatches
    core = (
        replace(ticks, problem=problem.model_copy(update={"microbatches": few, "microbatch_routes": None}))
        if shortened
        else ticks
    )
    for short in improvements(core, prune(unroll(core, pattern, METHOD)), budget, keeper.request.seed):
        schedule = _lengthened(problem, short) if shortened else short
        if schedule:
            keeper.offer(replace(schedule, method=METHOD))


def _lengthened(problem: Problem, short: Schedule) -> Schedule | None:
    table, start = short.timeline.table, short.timeline.start
    rows = table[:, KIND] != Kind.D  # `lift` derives drops
    longer = lengthened(table[rows], start[rows], problem.microbatches)
    return prune(lift_table(problem, *longer)) if longer else None


def patterns(ticks: Ticks, K: int, budget: Budget, least_left: float, seed: int) -> Iterator[Pattern]:
    """Patterns of K micro-batches: the shortest period found before so little of the budget is left, then longer ones
    of less latency."""

    def solve(period: int, below: int | None = None) -> Pattern | None:
        seconds = min(budget.left() - least_left, PERIOD_S)
        return PatternModel(ticks, K, period).solve(budget, seed, seconds, below).pattern if seconds > 0 else None

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
    """The pattern of the shortest period: `least` if it may be, otherwise by steps that double, then halving what is
    left between."""
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
