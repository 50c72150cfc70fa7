"""The search: window after window. What ends no later is taken even where nothing is gained yet: it makes room for
other windows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from optpipe.process.protocol import Frame, Request
from optpipe.schedule import Schedule
from optpipe_solver.budget import Budget
from optpipe_solver.cpsat.ticks import Ticks
from optpipe_solver.cpsat.timed import timed
from optpipe_solver.cpsat.whole import Starts, WindowModel, everything
from optpipe_solver.keeper import TimedKeeper
from optpipe_solver.lift import lift
from optpipe_solver.lns.windows import PATIENCE, Choice
from optpipe_solver.prune import prune


def run(request: Request, emit: Callable[[Frame], None]) -> float | None:
    """Emits better and better schedules until the request's time is up; returns how much of it was used by count."""
    keeper, budget = TimedKeeper(request, emit), Budget(request.time_limit_s, request.threads)
    keeper.heuristic()
    if keeper.start:
        for schedule in improvements(Ticks.of(request.problem), keeper.start, budget, request.seed):
            keeper.offer(schedule)
    return budget.spent_s


def improvements(ticks: Ticks, schedule: Schedule, budget: Budget, seed: int) -> Iterator[Schedule]:
    """Schedules that end sooner and sooner, each by solving windows of the one before, until the budget is spent or a
    window that holds everything has been solved to its end."""
    chance = random.Random(seed)
    choice = Choice(ticks, chance)
    known = timed(ticks, schedule)
    while budget.left() > 0:
        breadth, window = choice.window(known)
        model = WindowModel(ticks, known, window, "stages", objective="ends")
        budget.handled(len(known.start))
        answer = model.solve(budget, chance.randrange(2**31), PATIENCE * choice.quick_s)
        before = known.end
        if answer.starts:
            found = finish(ticks, answer.starts)
            retimed = timed(ticks, found)
            if retimed.end <= known.end:
                shorter = retimed.end < known.end
                schedule, known = found, retimed
                if shorter:
                    yield schedule
        choice.learn(breadth, ticks.ms(before - known.end), answer.used_s, answer.proven)
        if answer.proven and window == everything(known):
            return


def finish(ticks: Ticks, starts: Starts) -> Schedule:
    """The schedule that a model's starts mean."""
    return prune(lift(ticks.problem, ticks.starts_ms(starts), "lns"))
