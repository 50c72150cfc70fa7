"""The search for the whole problem, from a schedule that is known.

First micro-batches keep their order, which finds good schedules soon. Where that may lose something, they are nameless
next, which proves bounds, and then in any order, which proves the optimum.

There are two grids. Schedules are found sooner in coarse ticks, rounded up. Proofs need times as they are or, if
they have too many decimals, rounded down. What is found on the second grid may not fit, so it is checked like all else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from math import ceil

import numpy as np

from optpipe.evaluate.objective import raises, reaches
from optpipe.lift import lift
from optpipe.model.arrays import Table
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.program import KIND, MICROBATCH, PART, STAGE, of_kinds
from optpipe.process.protocol import Bound, Frame, Request
from optpipe.prune import prune
from optpipe.schedule import Schedule
from optpipe_solver.bounds import lower_bound
from optpipe_solver.bounds.relaxations import one_level
from optpipe_solver.budget import Budget
from optpipe_solver.cpsat.grid import Grid
from optpipe_solver.cpsat.grid_schedule import BestGridSchedule, place_on_grid
from optpipe_solver.cpsat.model import Starts, WindowModel, order_is_free
from optpipe_solver.cpsat.variables import Order, Window

METHOD = "cpsat"
# Ticks, as `grid.FINEST`, where bounds are proven. With 2^38 of them CP-SAT 9.15 refutes solutions.
FINE = 2**24
FLOAT_NOISE = 1e-12  # relative: what a bound in ticks may be too high
# Of the time, and of what is left then.
IN_ORDER_SHARE, RANKS_SHARE = 0.1, 0.8
# The first step goes this part of the way from the bound to the best schedule; steps then double.
STEPS = 4
# Where nameless micro-batches can be shorter than all schedules known, their optimum is found up to this part of the
# makespan.
NEAR = 10_000


class WholeProblemSearch:
    """The best schedule and the best bound so far, and the steps that improve them."""

    def __init__(self, request: Request, emit: Callable[[Frame], None]) -> None:
        self.request, self.problem, self._emit = request, request.problem, emit
        self.grid, self.fine_grid = Grid.for_problem(self.problem), Grid.for_problem(self.problem, FINE)
        self.budget = Budget(request.time_limit_s, request.threads)
        self.best = BestGridSchedule(request, emit)
        self._bound = lower_bound(self.problem, request.objective)
        self._bound_lock = threading.Lock()  # bounds come from a thread of CP-SAT's

    def run(self) -> None:
        """Ends when time is up or the best schedule is proven to be optimal."""
        self.best.ensure_start()
        if self.best.start is None or self._proven:
            return
        order_may_be_fixed = order_is_free(self.problem, self.request.objective)
        in_order_proves = order_may_be_fixed and self.grid.lossless
        self._solve(self.grid, "stages", self.budget.left() * (1.0 if in_order_proves else IN_ORDER_SHARE))
        # Where there may be pairs, ops that are rounded to nothing would look like some.
        provable = self.problem.overlap_factor is None
        if provable and not in_order_proves and self.request.objective == "makespan":
            provable = self._raise_bound(RANKS_SHARE * self.budget.left())
        if not in_order_proves and not self._proven:
            grid = self.fine_grid.relaxed if provable else self.grid
            self._solve(grid, "stages" if order_may_be_fixed else "entry", self.budget.left())

    @property
    def _proven(self) -> bool:
        return reaches(self.best.value, self._bound)

    def _model(self, grid: Grid, order: Order) -> WindowModel:
        assert self.best.start
        start = by_one_level(grid.problem, self.best.start) if order == "ranks" else self.best.start
        incumbent = place_on_grid(grid, number_by_entry(start))
        return WindowModel(grid, incumbent, Window.of_all(incumbent), order, self.request.objective)

    def _raise_bound(self, seconds: float) -> bool:
        """Looks for the least end that even nameless micro-batches can have: upwards from the bound, in steps that
        double. Returns whether the problem is small enough to prove anything: whether the first step was decided within
        half of the time.

        It starts at the bound of the rounded problem, of which some schedules may be shorter than any of the problem.
        """
        until, grid = self.budget.left() - seconds, Grid.for_problem(one_level(self.problem), FINE).relaxed
        least = ceil(lower_bound(grid.rounded) * (1 - FLOAT_NOISE))
        model = self._model(grid, "ranks")
        shortest = model.variables.incumbent.end
        most = shortest - 1
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
                self._offer_bound(grid.ms(least))
                end, step = min(most, end + step), 2 * step
            else:
                return decided
            decided = True
            if most < shortest - 1 and most - least < shortest // NEAR:
                break
            model = self._model(grid, "ranks")
        return True

    def _offer_bound(self, ms: float) -> None:
        with self._bound_lock:
            if raises(ms, self._bound):
                self._bound = ms
                self._emit(Bound(method=METHOD, lower_bound_ms=ms))

    def _solve(self, grid: Grid, order: Order, seconds: float) -> None:
        """Emits better schedules and, where the model's bounds hold for every schedule, better bounds."""
        model = self._model(grid, order)
        # Rounded down, there may be shorter solutions; only what they lift to is no shorter than the bound.
        if not grid.down:
            model.model.add(model.objective >= ceil(self._bound / float(grid.tick) * (1 - FLOAT_NOISE)))

        def on_better(starts: Starts) -> None:
            self.best.offer(prune(lift(self.problem, grid.starts_ms(starts), METHOD)))

        def on_bound(bound: int) -> None:
            self._offer_bound(grid.ms(bound))

        bound_callback = on_bound if model.is_bound else None
        answer = model.solve(self.budget, self.request.seed, seconds, on_better=on_better, on_bound=bound_callback)
        if model.is_bound:
            on_bound(answer.bound)


def by_one_level(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule in the relaxation with one level (`one_level`), where checkpoints leave without transfers."""
    level = schedule.compiled.index.level

    def changed(table: Table) -> Table:
        again = level[table[:, STAGE], table[:, MICROBATCH]] >= 0
        table = table[~(again & of_kinds(table, Kind.O, Kind.D, Kind.R))]
        table[of_kinds(table, Kind.C), PART] = 0
        return table

    return replace(schedule.with_tables(changed), problem=problem)


def number_by_entry(schedule: Schedule) -> Schedule:
    """The same schedule with equal micro-batches numbered as they enter their route."""
    problem = schedule.problem
    name = np.arange(problem.microbatches)
    for c, batches in enumerate(problem.costs.classes):
        route = problem.route(batches[0])
        program = schedule.programs[problem.stages[route[0]].device].table
        enters = (
            (program[:, KIND] == Kind.F)
            & (program[:, STAGE] == route[0])
            & (problem.costs.class_of[program[:, MICROBATCH]] == c)
        )
        entered = program[enters, MICROBATCH]
        name[entered] = np.sort(entered)
    return schedule.renumbered(problem, name)
