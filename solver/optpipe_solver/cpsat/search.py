"""The search for the whole problem, from a schedule on.

First micro-batches keep their order, which finds good schedules soon. Where that may lose something, they are
anonymous next, which proves bounds, and then in any order, which proves the optimum.

There are two grids. Schedules are found sooner in coarse ticks, rounded up. Proofs need times as they are or, if
they have too many decimals, rounded down. What is found on the second grid may not fit, so it is checked like all else.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import numpy as np

from optpipe.lift import lift, prune
from optpipe.model.arrays import Table
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.program import KIND, MICROBATCH, PART, STAGE, of_kinds
from optpipe.process.protocol import Request
from optpipe.schedule import Schedule
from optpipe_solver.bounds import lower_bound
from optpipe_solver.bounds.problem_facts import one_level, without_evictions
from optpipe_solver.clock import Clock
from optpipe_solver.cpsat.anonymous import AnonymousModel
from optpipe_solver.cpsat.grid import Grid, ensure_start, evicts, is_expressible, place_on_grid
from optpipe_solver.cpsat.model import Starts, WindowModel, order_is_free
from optpipe_solver.cpsat.variables import Window
from optpipe_solver.incumbents import Emit, Incumbents

METHOD = "cpsat"
# Ticks, as `grid.FINEST`, where bounds are proven. With 2^38 of them CP-SAT 9.15 refutes solutions.
FINE = 2**24
FLOAT_NOISE = 1e-12  # relative: what a bound in ticks may be too high
# Of the time, and of what is left then.
IN_ORDER_SHARE, ANONYMOUS_SHARE = 0.1, 0.8
# The first step goes this part of the way from the bound to the best schedule; steps then double.
STEPS = 4
# Where anonymous micro-batches can be shorter than all schedules so far, their optimum is found up to this part of the
# makespan.
NEAR = 10_000


class WholeProblemSearch:
    """The best schedule and the best bound so far, and the steps that improve them."""

    def __init__(self, request: Request, emit: Emit) -> None:
        self.request, self.problem = request, request.problem
        self.grid, self.fine_grid = Grid.for_problem(self.problem), Grid.for_problem(self.problem, FINE)
        self.clock = Clock.for_request(request)
        self.incumbents = Incumbents.of_engine(request, emit, is_expressible)
        self.incumbents.bound_ms = lower_bound(self.problem, request.objective)

    def run(self) -> None:
        """Ends when time is up or the best schedule is proven to be optimal."""
        if ensure_start(self.incumbents) is None or self.incumbents.proven:
            return
        order_may_be_fixed = order_is_free(self.problem, self.request.objective)
        in_order_proves = order_may_be_fixed and self.grid.lossless
        self._solve(self.grid, True, self.clock.left_s * (1.0 if in_order_proves else IN_ORDER_SHARE))
        # Where there may be pairs, ops that are rounded to nothing would look like some.
        provable = self.problem.overlap_factor is None
        if provable and not in_order_proves and self.request.objective == "makespan":
            provable = self._raise_bound(ANONYMOUS_SHARE * self.clock.left_s)
        if not in_order_proves and not self.incumbents.proven:
            grid = self.fine_grid.relaxed if provable else self.grid
            self._solve(grid, order_may_be_fixed, self.clock.left_s)

    @property
    def _start(self) -> Schedule:
        start = self.incumbents.best_of(is_expressible)
        assert start
        return start

    def _raise_bound(self, seconds: float) -> bool:
        """Looks for the least end that even anonymous micro-batches can have: upwards from the bound, in steps that
        double. Returns whether the problem is small enough to prove anything: whether the first step was decided within
        half of the time.

        It starts at the bound of the rounded problem, of which some schedules may be shorter than any of the problem.
        """
        least_left_s, relaxation = self.clock.left_s - seconds, one_level(without_evictions(self.problem))
        grid = Grid.for_problem(relaxation, FINE).relaxed
        least = ceil(lower_bound(grid.rounded) * (1 - FLOAT_NOISE))
        incumbent = place_on_grid(grid, number_by_entry(by_one_level(grid.problem, self._start)))
        model, shortest = AnonymousModel(grid, incumbent), incumbent.end
        most = shortest - 1
        step = max(1, (most - least) // STEPS)
        end = least + step - 1
        decided = False
        while model.is_bound and least <= min(end, most) and self.clock.left_s > least_left_s:
            model.model.add(model.end >= least)
            model.model.add(model.end <= end)
            left_s = self.clock.left_s - least_left_s
            seconds = left_s if decided else left_s / 2
            answer = model.solve(self.clock, self.request.threads, self.request.seed, seconds, any_will_do=True)
            if answer.starts is not None:
                most = end - 1
                end = (least + most) // 2
            elif answer.proven:
                least = end + 1
                self.incumbents.raise_bound(grid.ms(least), METHOD)
                end, step = min(most, end + step), 2 * step
            else:
                return decided
            decided = True
            if most < shortest - 1 and most - least < shortest // NEAR:
                break
            model = AnonymousModel(grid, incumbent)
        return True

    def _solve(self, grid: Grid, in_order: bool, seconds: float) -> None:
        """Emits better schedules and, where the model's bounds hold for every schedule, better bounds."""
        incumbent = place_on_grid(grid, number_by_entry(self._start))
        model = WindowModel(grid, incumbent, Window.of_all(incumbent), in_order, self.request.objective)
        # Rounded down, there may be shorter solutions; only what they lift to is no shorter than the bound.
        if not grid.down:
            model.model.add(model.objective >= ceil(self.incumbents.bound_ms / float(grid.tick) * (1 - FLOAT_NOISE)))

        def on_better(starts: Starts) -> None:
            self.incumbents.offer(prune(lift(self.problem, grid.starts_ms(starts), METHOD)))

        def on_bound(bound: int) -> None:
            self.incumbents.raise_bound(grid.ms(bound), METHOD)

        limits = self.clock, self.request.threads, self.request.seed, seconds
        answer = model.solve(*limits, on_better=on_better, on_bound=on_bound if model.is_bound else None)
        if model.is_bound:
            on_bound(answer.bound)


def by_one_level(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule in the relaxation with one level (`one_level`), where checkpoints leave without transfers, and in
    which what was evicted is recomputed (`without_evictions`)."""
    level = schedule.compiled.index.level

    def changed(table: Table) -> Table:
        again = (level[table[:, STAGE], table[:, MICROBATCH]] >= 0) | evicts(schedule, table)
        table = table[~(again & of_kinds(table, Kind.O, Kind.D, Kind.R, Kind.E, Kind.A, Kind.V))]
        table[of_kinds(table, Kind.L), KIND] = Kind.C
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
