"""The engine's search: patterns of the shortest period and of some longer ones, then windows of the best of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil

from optpipe.lift import lift_table
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.program import KIND
from optpipe.process.protocol import Frame, Request
from optpipe.prune import prune
from optpipe.schedule import Schedule
from optpipe_solver.budget import Budget
from optpipe_solver.cpsat.grid import Grid
from optpipe_solver.cpsat.grid_incumbent import BestGridSchedule
from optpipe_solver.cyclic.pattern import Pattern, PatternModel, least_period, sequential_period
from optpipe_solver.cyclic.unroll import unroll
from optpipe_solver.heuristics.periods import lengthened
from optpipe_solver.lns.improve import improvements

METHOD = "cyclic"
LARGEST_K = 4
WORTHWHILE = 1.5  # windows improve a shorter schedule where it has so many times fewer micro-batches
PATTERNS_SHARE = 0.4  # of the time, at most
PERIOD_S = 10.0  # for one period, at most
# Of the shortest period. A longer one may have so much less latency that it pays.
STRETCHES = (1.02, 1.05, 1.1, 1.2, 1.35)


def search(request: Request, emit: Callable[[Frame], None]) -> float | None:
    """Runs the engine; returns the seconds used by its own count of work."""
    best, budget = BestGridSchedule(request, emit), Budget(request.time_limit_s, request.threads)
    grid = Grid.of(request.problem)
    pattern = _offer_patterns(grid, best, budget)
    if pattern:
        _improve_windows(grid, pattern, best, budget)
    return budget.spent_s


def _offer_patterns(grid: Grid, best: BestGridSchedule, budget: Budget) -> Pattern | None:
    """Offers the schedules that patterns unroll to; returns the pattern of the shortest."""
    chosen: list[tuple[float, int, Pattern]] = []
    least_left = (1 - PATTERNS_SHARE) * budget.left()
    for K in range(1, min(LARGEST_K, grid.problem.microbatches) + 1):
        shortest = None
        for pattern in patterns(grid, K, budget, least_left, best.request.seed):
            schedule = prune(unroll(grid, pattern, METHOD))
            best.offer(schedule)
            chosen.append((schedule.makespan_ms, len(chosen), pattern))
            shortest = shortest or pattern
        if shortest and shortest.period == least_period(grid, K):
            break  # more micro-batches could not repeat in less
    return min(chosen)[2] if chosen else None


def _improve_windows(grid: Grid, pattern: Pattern, best: BestGridSchedule, budget: Budget) -> None:
    """Improves the schedule that the pattern unrolls to, window by window.

    Of many micro-batches only so many are unrolled that a period lies between warm-up and cool-down; that period is
    repeated in each schedule found.
    """
    problem, K = grid.problem, pattern.microbatches
    few = 3 * K * ceil(pattern.latency / pattern.period)
    shortened = few * WORTHWHILE < problem.microbatches
    core = (
        replace(grid, problem=problem.model_copy(update={"microbatches": few, "microbatch_routes": None}))
        if shortened
        else grid
    )
    start, request = prune(unroll(core, pattern, METHOD)), best.request
    for short in improvements(core, start, budget, request.seed, request.objective):
        schedule = _lengthened(problem, short) if shortened else short
        if schedule:
            best.offer(replace(schedule, method=METHOD))


def _lengthened(problem: Problem, short: Schedule) -> Schedule | None:
    table, start = short.timeline.table, short.timeline.start
    rows = table[:, KIND] != Kind.D  # `lift` derives drops
    longer = lengthened(table[rows], start[rows], problem.microbatches)
    return prune(lift_table(problem, *longer)) if longer else None


def patterns(grid: Grid, K: int, budget: Budget, least_left: float, seed: int) -> Iterator[Pattern]:
    """Yields patterns of K micro-batches: the shortest period found until only `least_left` of the budget is left, then
    longer ones of less latency."""

    def solve(period: int, below: int | None = None) -> Pattern | None:
        seconds = min(budget.left() - least_left, PERIOD_S)
        return PatternModel(grid, K, period).solve(budget, seed, seconds, below).pattern if seconds > 0 else None

    shortest = _shortest(solve, least_period(grid, K), sequential_period(grid, K))
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
    """The pattern of the shortest period: `least` if there is one, else by steps that double, then by bisection."""
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
