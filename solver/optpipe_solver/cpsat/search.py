"""The engine: the whole problem from a schedule that is known, first with the micro-batches in order, which finds good schedules soon,
then, where that may lose something, in any order, which proves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from math import ceil

import numpy as np

from optpipe.child import Bound, Frame, Incumbent, Programs, Request
from optpipe.errors import InputError
from optpipe.ops import Kind
from optpipe.program import KIND, MICROBATCH, STAGE, Program
from optpipe.schedule import Schedule
from optpipe.validity import check
from optpipe_solver.bounds import memory_bound, trivial_bound
from optpipe_solver.budget import Budget
from optpipe_solver.cpsat.ticks import Ticks
from optpipe_solver.cpsat.timed import covers, split, timed
from optpipe_solver.cpsat.whole import Starts, WindowModel, everything
from optpipe_solver.heuristics import generate, value
from optpipe_solver.lift import lift
from optpipe_solver.methods import WITHIN_MEMORY
from optpipe_solver.prune import prune

METHOD = "cpsat"
IN_ORDER_SHARE = 0.4  # of the time


class Search:
    """What is best so far, and who is told."""

    def __init__(self, request: Request, emit: Callable[[Frame], None]) -> None:
        self.request, self._emit = request, emit
        self.problem, self.ticks = request.problem, Ticks.of(request.problem)
        self.start: Schedule | None = None  # the best that the model knows
        self.value = float("inf")
        self._bound = max(trivial_bound(self.problem, request.objective), memory_bound(self.problem, request.objective))
        self._telling = threading.Lock()  # bounds come from a thread of CP-SAT's
        self._deadline = time.monotonic() + request.time_limit_s

    def left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def begin(self) -> bool:
        """Takes the warm start or, where there is none that the model knows, a heuristic's schedule; says whether there is one."""
        warm = self.request.warm_start
        if warm is not None:
            try:
                schedule = warm.schedule(self.problem, METHOD)
            except InputError:
                schedule = None
            if schedule and not check(self.problem, schedule):
                self.value = value(schedule, self.request.objective)
                self._keep(split(schedule))
        alone = self.problem.model_copy(update={"overlap_factor": None})  # the model knows no pairs
        for name in WITHIN_MEMORY:
            if self.start is None:
                self.offer(split(replace(generate(name, alone, self.request.objective), problem=self.problem)))
        return self.start is not None

    def _keep(self, schedule: Schedule) -> None:
        if covers(schedule) and not check(self.problem, schedule):
            self.start = numbered(schedule)

    def offer(self, schedule: Schedule) -> None:
        """Keeps the schedule if the model has none yet or it is better, tells it if it is better than all before, and holds."""
        found = value(schedule, self.request.objective)
        better = found < self.value * (1 - 1e-9)
        if (better or self.start is None) and not check(self.problem, schedule):
            self._keep(schedule)
            if better:
                self.value = found
                self._emit(Incumbent(method=schedule.method, schedule=Programs.of(schedule)))

    def solve(self, in_order: bool, seconds: float) -> bool:
        """Whether the best is known to be the best now."""
        assert self.start
        known = timed(self.ticks, self.start)
        model = WindowModel(self.ticks, known, everything(known), in_order, self.request.objective)
        model.model.add(model.objective >= ceil(self._bound / float(self.ticks.tick) * (1 - 1e-12)))

        def on_better(starts: Starts) -> None:
            self.offer(prune(lift(self.problem, self.ticks.starts_ms(starts), METHOD)))

        def on_bound(bound: int) -> None:
            with self._telling:
                ms = self.ticks.ms(bound)
                if model.is_bound and ms > self._bound * (1 + 1e-9):
                    self._bound = ms
                    self._emit(Bound(method=METHOD, lower_bound_ms=ms))

        answer = model.solve(Budget(seconds, self.request.threads), self.request.seed, on_better=on_better, on_bound=on_bound)
        on_bound(answer.bound)
        return answer.proven and model.is_bound

    def run(self) -> None:
        if self.begin() and self.value > self._bound * (1 + 1e-9):
            alike = not any(stage.can_offload or stage.can_recompute for stage in self.problem.stages)
            if not self.solve(True, self.left() if alike else IN_ORDER_SHARE * self.left()) and not alike:
                self.solve(False, self.left())


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
