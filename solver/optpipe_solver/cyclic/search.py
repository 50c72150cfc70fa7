"""The engine: patterns first, the shortest period there is and some longer ones; then, where there are more micro-batches than that takes,
warm-up and cool-down on their own, with the periods put in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil

from optpipe.child import Frame, Request
from optpipe.errors import OptPipeError
from optpipe.schedule import Schedule
from optpipe_solver.budget import Budget
from optpipe_solver.cpsat.ticks import Ticks
from optpipe_solver.cpsat.timed import covers, split
from optpipe_solver.cyclic.pattern import Pattern, PatternModel, least_period, sequential_period
from optpipe_solver.cyclic.unroll import repeat_within, unroll
from optpipe_solver.heuristics import generate
from optpipe_solver.keeper import Keeper
from optpipe_solver.lns.search import improvements
from optpipe_solver.methods import WITHIN_MEMORY
from optpipe_solver.prune import prune

METHOD = "cyclic"
LARGEST_K = 4
PATTERNS_SHARE = 0.5  # of the time, at most
PERIOD_S = 10.0  # for one period, at most
STRETCHES = (1.02, 1.05, 1.1, 1.2, 1.35)  # of the shortest period: a longer one may have so much less latency that it pays


def run(request: Request, emit: Callable[[Frame], None]) -> float | None:
    """Emits better and better schedules until the request's time is up; returns how much of it was used by count."""
    keeper, budget = Keeper(request, emit), Budget(request.time_limit_s, request.threads)
    ticks = Ticks.of(request.problem)
    pattern = _patterns(ticks, keeper, budget)
    if pattern:
        _ramps(ticks, pattern, keeper, budget)
    return budget.spent_s


def _patterns(ticks: Ticks, keeper: Keeper, budget: Budget) -> Pattern | None:
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


def _ramps(ticks: Ticks, pattern: Pattern, keeper: Keeper, budget: Budget) -> None:
    """Searches the problem of just so many micro-batches that warm-up and cool-down meet, and puts the periods between them into each
    schedule found."""
    K, most = pattern.microbatches, ticks.problem.microbatches
    few = 2 * K * -(-pattern.latency // pattern.period)
    few += (most - few) % K
    if few >= most:
        return
    core = replace(ticks, problem=ticks.problem.model_copy(update={"microbatches": few, "microbatch_routes": None}))
    starts = [prune(unroll(core, pattern, METHOD)), *_heuristics(core)]
    start = min(starts, key=lambda schedule: schedule.makespan_ms)
    for short in (start, *improvements(core, start, budget, keeper.request.seed)):
        longer = repeat_within(ticks, pattern, replace(short, method=METHOD))
        if longer:
            keeper.offer(prune(longer))


def _heuristics(ticks: Ticks) -> Iterator[Schedule]:
    """What heuristics make of the problem, as far as the models here know it."""
    problem = ticks.problem.model_copy(update={"overlap_factor": None})
    for name in WITHIN_MEMORY:
        try:
            schedule = split(replace(generate(name, problem, "makespan"), problem=ticks.problem))
        except OptPipeError:
            continue
        if covers(schedule):
            yield schedule


def patterns(ticks: Ticks, K: int, budget: Budget, least_left: float, seed: int) -> Iterator[Pattern]:
    """Patterns of K micro-batches: the shortest period found before so little of the budget is left, then longer ones of less latency."""

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
