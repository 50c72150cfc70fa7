"""The engine: the whole problem from a schedule that is known, first with the micro-batches in order, which finds good schedules soon;
where that may lose something, then without names for them, which proves bounds, and then in any order, which proves all there is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from math import ceil

import numpy as np

from optpipe.child import Bound, Frame, Request
from optpipe.ops import Kind
from optpipe.program import KIND, MICROBATCH, STAGE, Program
from optpipe.schedule import Schedule
from optpipe_solver.bounds import memory_bound, trivial_bound
from optpipe_solver.budget import Budget
from optpipe_solver.cpsat.ticks import Ticks
from optpipe_solver.cpsat.timed import timed
from optpipe_solver.cpsat.whole import Order, Starts, WindowModel, everything, order_is_free
from optpipe_solver.keeper import Keeper
from optpipe_solver.lift import lift
from optpipe_solver.prune import prune

METHOD = "cpsat"
IN_ORDER_SHARE, RANKS_SHARE = 0.1, 0.8  # of the time, and of what is left then


class Search:
    """What is best so far, and what bound is known."""

    def __init__(self, request: Request, emit: Callable[[Frame], None]) -> None:
        self.request, self._emit = request, emit
        self.problem, self.ticks = request.problem, Ticks.of(request.problem)
        self.budget = Budget(request.time_limit_s, request.threads)
        self.keeper = Keeper(request, emit)
        self._bound = max(trivial_bound(self.problem, request.objective), memory_bound(self.problem, request.objective))
        self._telling = threading.Lock()  # bounds come from a thread of CP-SAT's

    def run(self) -> None:
        """Ends when time is up or the best is proven to be it."""
        self.keeper.heuristic()
        if self.keeper.start is not None and self.keeper.value > self._bound * (1 + 1e-9):
            free = order_is_free(self.problem, self.request.objective)
            self.solve("stages", self.budget.left() * (1.0 if free else IN_ORDER_SHARE))
            if not free and self.request.objective == "makespan":
                self.raise_bound(RANKS_SHARE * self.budget.left())
            if not free and self.keeper.value > self._bound * (1 + 1e-9):
                self.solve("entry", self.budget.left())

    def _model(self, order: Order) -> WindowModel:
        assert self.keeper.start
        known = timed(self.ticks, numbered(self.keeper.start))
        model = WindowModel(self.ticks, known, everything(known), order, self.request.objective)
        model.model.add(model.objective >= self._least)
        return model

    @property
    def _least(self) -> int:
        """Ticks, by the bound."""
        return ceil(self._bound / float(self.ticks.tick) * (1 - 1e-12))

    def raise_bound(self, seconds: float) -> None:
        """Looks for the least end that even nameless micro-batches can have, from the bound upwards in steps that double."""
        until = self.budget.left() - seconds
        most = ceil(self.keeper.value / float(self.ticks.tick) * (1 - 1e-12)) - 1
        end, step = self._least, 1
        while self._least <= end and self.budget.left() > until:
            model = self._model("ranks")
            if not model.is_bound:
                return
            model.model.add(model.end <= end)
            answer = model.solve(self.budget, self.request.seed, self.budget.left() - until, any_will_do=True)
            if answer.proven and answer.starts is None:
                self._tell_bound(end + 1)
                end, step = min(most, end + step), 2 * step
            else:
                most = end - 1
                end = (self._least + most) // 2

    def _tell_bound(self, bound: int) -> None:
        with self._telling:
            ms = self.ticks.ms(bound)
            if ms > self._bound * (1 + 1e-9):
                self._bound = ms
                self._emit(Bound(method=METHOD, lower_bound_ms=ms))

    def solve(self, order: Order, seconds: float) -> None:
        """Tells of better schedules and, where the model's bounds hold for every schedule, of those."""
        model = self._model(order)

        def on_better(starts: Starts) -> None:
            self.keeper.offer(prune(lift(self.problem, self.ticks.starts_ms(starts), METHOD)))

        on_bound = self._tell_bound if model.is_bound else None
        answer = model.solve(self.budget, self.request.seed, seconds, on_better=on_better, on_bound=on_bound)
        if on_bound:
            on_bound(answer.bound)


def numbered(schedule: Schedule) -> Schedule:
    """The same with the micro-batches of each route numbered as they enter it."""
    problem = schedule.problem
    tables = [*(program.table for program in schedule.programs), *(order.table for order in schedule.links.values())]
    name = np.arange(problem.microbatches)
    for r, route in enumerate(problem.all_routes):
        program = schedule.programs[problem.stages[route[0]].device].table
        enters = (program[:, KIND] == Kind.F) & (program[:, STAGE] == route[0]) & (problem.costs.route[program[:, MICROBATCH]] == r)
        entered = program[enters, MICROBATCH]
        name[entered] = np.sort(entered)
    renamed = [table.copy() for table in tables]
    for table in renamed:
        table[:, MICROBATCH] = name[table[:, MICROBATCH]]
    programs = tuple(Program(table) for table in renamed[: len(schedule.programs)])
    links = dict(zip(schedule.links, (Program(table) for table in renamed[len(programs) :]), strict=True))
    return replace(schedule, programs=programs, links=links)
