"""Window after window of a schedule. A solution that ends no later is taken: even if nothing is gained, it makes room
for other windows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from optpipe.evaluate.objective import Objective
from optpipe.lift import lift
from optpipe.process.protocol import Frame, Request
from optpipe.prune import prune
from optpipe.schedule import Schedule
from optpipe_solver.budget import Budget
from optpipe_solver.cpsat.grid import Grid
from optpipe_solver.cpsat.grid_incumbent import BestGridSchedule
from optpipe_solver.cpsat.grid_schedule import place_on_grid
from optpipe_solver.cpsat.model import WindowModel
from optpipe_solver.cpsat.variables import Window
from optpipe_solver.lns.choice import PATIENCE, WindowChoice

METHOD = "lns"


def improve(request: Request, emit: Callable[[Frame], None]) -> float | None:
    """Run the engine. Returns the seconds used by its own count of work."""
    best, budget = BestGridSchedule(request, emit), Budget(request.time_limit_s, request.threads)
    best.ensure_start()
    if best.start:
        for schedule in improvements(
            Grid.for_problem(request.problem), best.start, budget, request.seed, request.objective
        ):
            best.offer(schedule)
    return budget.spent_s


def improvements(
    grid: Grid, schedule: Schedule, budget: Budget, seed: int, objective: Objective = "makespan"
) -> Iterator[Schedule]:
    """Yield shorter and shorter schedules, until the budget is spent or a window of everything is solved."""
    random_ = random.Random(seed)
    choice = WindowChoice(grid, random_)
    incumbent = place_on_grid(grid, schedule, objective)
    while budget.left() > 0:
        breadth, window = choice.window(incumbent)
        model = WindowModel(grid, incumbent, window, "stages", objective="ends")
        budget.handled(len(incumbent.start))
        answer = model.solve(budget, random_.randrange(2**31), PATIENCE * choice.quick_s)
        is_whole, before = window == Window.of_all(incumbent), incumbent.length
        if answer.starts:
            compacted = prune(lift(grid.problem, grid.starts_ms(answer.starts), METHOD))
            candidate = place_on_grid(grid, compacted, objective)
            if candidate.length <= before:
                incumbent = candidate
                if candidate.length < before:
                    yield compacted
        choice.learn(breadth, grid.ms(before - incumbent.length), answer.used_s, answer.proven)
        if answer.proven and is_whole and (objective == "makespan" or incumbent.length == before):
            return
