"""The engine: the whole problem from a schedule that is known, first with the micro-batches in order, which finds good
schedules soon; where that may lose something, then without names for them, which proves bounds, and then in any order,
which proves all there is.

Two grids: schedules are found sooner in coarse ticks, rounded up, and proofs want times as they are or, where these
have too many decimals, rounded down. Then what a model finds need not fit, so the keeper looks at it, as at everything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from math import ceil

import numpy as np

from optpipe.model.ops import Kind
from optpipe.model.program import KIND, MICROBATCH, STAGE, Program
from optpipe.process.protocol import Bound, Frame, Request
from optpipe.schedule import Schedule
from optpipe_solver.bounds import memory_bound, trivial_bound
from optpipe_solver.budget import Budget
from optpipe_solver.cpsat.ticks import Ticks
from optpipe_solver.cpsat.timed import timed
from optpipe_solver.cpsat.whole import Order, Starts, WindowModel, everything, order_is_free
from optpipe_solver.keeper import TimedKeeper
from optpipe_solver.lift import lift
from optpipe_solver.prune import prune

METHOD = "cpsat"
FINE = 2**24  # ticks, as `ticks.FINEST`, where bounds are proven; at 2^38 CP-SAT 9.15 refutes what there is
IN_ORDER_SHARE, RANKS_SHARE = 0.1, 0.8  # of the time, and of what is left then
STEPS = 4  # of the way from the bound to the best schedule is tried first, then steps that double
# of the makespan: where nameless micro-batches are shorter than all that is known, how short need not be known better
NEAR = 10_000


class Search:
    """What is best so far, and what bound is known."""

    def __init__(self, request: Request, emit: Callable[[Frame], None]) -> None:
        self.request, self._emit = request, emit
        self.problem, self.ticks, self.finest = (
            request.problem,
            Ticks.of(request.problem),
            Ticks.of(request.problem, FINE),
        )
        self.budget = Budget(request.time_limit_s, request.threads)
        self.keeper = TimedKeeper(request, emit)
        self._bound = max(trivial_bound(self.problem, request.objective), memory_bound(self.problem, request.objective))
        self._telling = threading.Lock()  # bounds come from a thread of CP-SAT's

    def run(self) -> None:
        """Ends when time is up or the best is proven to be it."""
        self.keeper.heuristic()
        if self.keeper.start is None or self._proven:
            return
        free = order_is_free(self.problem, self.request.objective)
        at_once = free and self.ticks.lossless
        self.solve(self.ticks, "stages", self.budget.left() * (1.0 if at_once else IN_ORDER_SHARE))
        provable = (
            self.problem.overlap_factor is None
        )  # where there may be pairs, ops rounded to nothing would look like some
        if provable and not at_once and self.request.objective == "makespan":
            provable = self.raise_bound(RANKS_SHARE * self.budget.left())
        if not at_once and not self._proven:
            self.solve(
                self.finest.relaxed if provable else self.ticks, "stages" if free else "entry", self.budget.left()
            )

    @property
    def _proven(self) -> bool:
        return self.keeper.value <= self._bound * (1 + 1e-9)

    def _model(self, ticks: Ticks, order: Order) -> WindowModel:
        assert self.keeper.start
        known = timed(ticks, numbered(self.keeper.start))
        return WindowModel(ticks, known, everything(known), order, self.request.objective)

    def raise_bound(self, seconds: float) -> bool:
        """Looks for the least end that even nameless micro-batches can have, from the bound upwards in steps that
        double. Says if the problem is of a size of which anything can be known: whether the first step was decided
        within half of the time.

        By the grid's own bound: rounded down, there may be schedules that are shorter than any of the problem.
        """
        until, ticks = self.budget.left() - seconds, self.finest.relaxed
        least = ceil(max(trivial_bound(ticks.rounded), memory_bound(ticks.rounded)) * (1 - 1e-12))
        model = self._model(ticks, "ranks")
        known = model.incumbent.end
        most = known - 1
        step = max(1, (most - least) // STEPS)
        end = least + step - 1
        decided = False
        while model.is_bound and least <= min(end, most) and self.budget.left() > until:
            model.model.add(model.end >= least)
            model.model.add(model.end <= end)
            left = self.budget.left() - until
            answer = model.solve(self.budget, self.request.seed, left if decided else left / 2, any_will_do=True)
            if answer.starts is not None:
                most = end - 1
                end = (least + most) // 2
            elif answer.proven:
                least = end + 1
                self._tell_bound(ticks.ms(least))
                end, step = min(most, end + step), 2 * step
            else:
                return decided
            decided = True
            if most < known - 1 and most - least < known // NEAR:
                break
            model = self._model(ticks, "ranks")
        return True

    def _tell_bound(self, ms: float) -> None:
        with self._telling:
            if ms > self._bound * (1 + 1e-9):
                self._bound = ms
                self._emit(Bound(method=METHOD, lower_bound_ms=ms))

    def solve(self, ticks: Ticks, order: Order, seconds: float) -> None:
        """Tells of better schedules and, where the model's bounds hold for every schedule, of those."""
        model = self._model(ticks, order)
        if not ticks.down:  # else there may be shorter solutions, of which schedules are no shorter than the bound
            model.model.add(model.objective >= ceil(self._bound / float(ticks.tick) * (1 - 1e-12)))

        def on_better(starts: Starts) -> None:
            self.keeper.offer(prune(lift(self.problem, ticks.starts_ms(starts), METHOD)))

        def on_bound(bound: int) -> None:
            self._tell_bound(ticks.ms(bound))

        answer = model.solve(
            self.budget, self.request.seed, seconds, on_better=on_better, on_bound=on_bound if model.is_bound else None
        )
        if model.is_bound:
            on_bound(answer.bound)


def numbered(schedule: Schedule) -> Schedule:
    """The same with the micro-batches of each route numbered as they enter it."""
    problem = schedule.problem
    tables = [*(program.table for program in schedule.programs), *(order.table for order in schedule.links.values())]
    name = np.arange(problem.microbatches)
    for r, route in enumerate(problem.all_routes):
        program = schedule.programs[problem.stages[route[0]].device].table
        enters = (
            (program[:, KIND] == Kind.F)
            & (program[:, STAGE] == route[0])
            & (problem.costs.route[program[:, MICROBATCH]] == r)
        )
        entered = program[enters, MICROBATCH]
        name[entered] = np.sort(entered)
    renamed = [table.copy() for table in tables]
    for table in renamed:
        table[:, MICROBATCH] = name[table[:, MICROBATCH]]
    programs = tuple(Program(table) for table in renamed[: len(schedule.programs)])
    links = dict(zip(schedule.links, (Program(table) for table in renamed[len(programs) :]), strict=True))
    return replace(schedule, programs=programs, links=links)
