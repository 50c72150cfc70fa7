"""`Portfolio`: the search for one request, an algorithm portfolio (Gomes and Selman 2001).

Heuristics run in this process, engines in processes of their own, as `tuning` has it. The best schedule and the best
bound of all of them are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from optpipe.errors import InputError, OptPipeError
from optpipe.evaluate.objective import length_ms
from optpipe.formats.stacks import STACKS
from optpipe.model.arrays import Ints, Table
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.model.program import PART, STAGE, of_kinds
from optpipe.process.protocol import Infeasible, Note, OtherStages, Programs, Request
from optpipe.reuse import repair
from optpipe.schedule import Schedule
from optpipe_solver import engines, methods, tuning
from optpipe_solver.bounds import memory_bound, ramp_bound, trivial_bound
from optpipe_solver.bounds.least_memory import infeasibility
from optpipe_solver.clock import Clock, FirstClock, counts_work
from optpipe_solver.incumbents import Emit, Incumbents
from optpipe_solver.portfolio.engine_runs import EngineRuns
from optpipe_solver.portfolio.heuristic_runs import HeuristicRuns
from optpipe_solver.schedule_facts import is_listed, is_modelled
from optpipe_solver.systems import fitting, in_best_order, is_system, on_other_stages


def incumbents_of(request: Request, emit: Emit) -> Incumbents:
    """The keeper of a search by heuristics and engines: engines begin with the best that they know all ops of,
    annealing also with the best of these that no engine found."""
    return Incumbents(request, emit, is_modelled, is_listed, hands_on_rules=True)


class Portfolio:
    """One request's search on the problem's own stages, from the `incumbents` of earlier searches on.

    `emit` is called at once with each better schedule, each better bound, and each note. Raises InputError if the
    method is unknown or does not apply to this problem.
    """

    def __init__(self, request: Request, emit: Emit, incumbents: Incumbents | None = None) -> None:
        self.request, self.emit = request, emit
        system: Schedule | None = None
        if is_system(request.method):
            system = in_best_order(request.method, request.problem, "keep", request.objective)
            if complaint := STACKS[request.stack].complaint(system):
                raise InputError(f"method = {request.method!r}: {complaint}")
        seconds = request.time_limit_s - min(tuning.STOP_S, request.time_limit_s / 4)
        self.clock = Clock(seconds, counts_work(request), wall_s=seconds)
        self.incumbents = incumbents or incumbents_of(request, emit)
        self.heuristics = HeuristicRuns(request, system, self.incumbents, self.clock, emit)
        self.is_infeasible: bool | None = None  # once it has begun

    def run(self) -> None:
        """Run heuristics and engines side by side until time is up, nothing is left to try or the best is proven.

        The MILP, asked for by name, runs whatever heuristics have found.
        """
        if not self.begin():  # bounds and the warm start; or there is no schedule at all
            return
        request, incumbents, clock = self.request, self.incumbents, self.clock
        only_own = STACKS[request.stack].only_own
        planned = [] if only_own else tuning.engine_runs(request.method, request.problem, self.supports)
        if request.method == methods.MILP and planned:
            self.emit(Note(text="milp: none of its searches had begun", method=methods.MILP, ongoing=True))
        if any(engines.waits_for_compiler(run.engine) for run in planned):
            self.emit(Note(text=engines.COMPILING))
        runs = EngineRuns(request, planned, incumbents, clock, self.emit)
        share = tuning.heuristics_share(request.problem, clock.seconds) if planned else 1.0
        if planned and incumbents.best and incumbents.best.method in methods.ENGINES:
            share = 0.0  # a search before this one went beyond heuristics
        heuristics = self.heuristics.run(share, lambda: runs.loading)
        heuristics_run = not incumbents.proven
        try:
            if heuristics_run:
                runs.prepare()
                if incumbents.best:  # the first heuristic may take long
                    runs.start_next(beside_heuristics=True)
            while True:
                if heuristics_run:  # one schedule of one of them, in this process; the first one in any case
                    heuristics_run = next(heuristics, "ended") is None and not incumbents.proven
                if clock.wall_left_s <= 0 or (incumbents.proven and not runs.unfinished(methods.MILP)):
                    break
                if incumbents.best or not heuristics_run:  # engines start from a schedule, if there is any
                    runs.start_next(beside_heuristics=heuristics_run)
                if not (heuristics_run or runs.running):
                    break
                runs.handle_messages(0.0 if heuristics_run else min(tuning.POLL_S, clock.wall_left_s))
                runs.limit_memory()
        finally:
            runs.stop_all()
        best, reports_itself = incumbents.best, request.method in (methods.MILP, methods.RELAX)
        named = request.method in methods.ENGINES and not reports_itself
        if named and planned and best and best.method != request.method and not incumbents.proven:
            self.emit(Note(text=f"{request.method} has no schedule that is shorter than the one by {best.method}"))

    def begin(self) -> bool:
        """Emit, once, what needs no search: that the problem is infeasible, or bounds, the warm start and the published
        schedules.

        Returns whether any schedule exists. The warm start has today's costs; it is in more parts, or repaired, if it
        does not hold for them.
        """
        if self.is_infeasible is None:
            self.is_infeasible = not self._begin()
        return not self.is_infeasible

    def _begin(self) -> bool:
        problem, objective = self.request.problem, self.request.objective
        if reason := infeasibility(problem):
            self.emit(Infeasible(reason=reason))
            return False
        self.incumbents.raise_bound(trivial_bound(problem, objective), "trivial")
        wrong: str | None = None
        try:
            for schedule in schedules_from(self.request.warm_start, problem) if self.request.warm_start else ():
                wrong = self.incumbents.offer(schedule)
                if not wrong:
                    break
        except OptPipeError as error:
            wrong = str(error)
        if wrong:
            self.emit(Note(text=f"the warm start is no schedule of this problem: {wrong}"))
        self.heuristics.begin()
        self.incumbents.raise_bound(memory_bound(problem, objective), "memory")
        self.incumbents.raise_bound(ramp_bound(problem, objective), "ramp")
        return True

    def supports(self, engine: str) -> bool:
        """Whether an engine can work on the problem.

        Emits a note if it was asked for by name and cannot, or if the problem allows what no engine makes.
        """
        problem = self.request.problem
        reason = engines.load(engine).unsupported(problem)
        if engine == self.request.method:
            if reason:
                self.emit(Note(text=f"{engine} does not apply: {reason}"))
            elif problem.overlap_factor is not None:
                self.emit(Note(text=f"{engine} makes no pairs: some heuristics and published schedules do"))
        return reason is None

    def look_at_other_stages(self) -> None:
        """Emit the shortest of the published schedules that fit on other stages, as many as a moment allows, and a note
        where that are not all."""
        request = self.request
        if not request.starts_from_known:
            return
        clock = FirstClock(request.time_limit_s)
        names = (name for name, _ in on_other_stages(request.problem))
        schedules = fitting(names, request.problem, "all", clock, request.stack)
        shortest = min(schedules, key=lambda each: length_ms(each, request.objective), default=None)
        if clock.over:
            self.emit(Note(text="not all published schedules on other stages were tried, for lack of time"))
        if shortest:
            self.emit(OtherStages(schedule=Programs.from_schedule(shortest)))


def schedules_from(start: Programs, problem: Problem) -> Iterator[Schedule]:
    """Yield a warm start with today's costs and, for a caller who finds that invalid, what can be made of it.

    Its stages are taken for those of the problem, whatever placement it names. Raises InputError if an op cannot be
    read.
    """
    schedule = start.model_copy(update={"placement": None}).schedule(problem, start.method or "warm start")
    yield schedule
    yield from in_more_parts(schedule)
    yield from filter(None, [repair(problem, schedule)])


def in_more_parts(schedule: Schedule) -> Iterator[Schedule]:
    """Yield the schedule as one of problems with fewer parts of activations, those with the most parts first.

    With n parts for k each transfer becomes n / k, one right after the other, of as many bytes in as much time. So what
    is valid with few parts is valid, and as long, with more. A schedule does not say how many parts there were: it may
    not move all of them. So all stages are taken to have had the same share of theirs, at last each only those moved.
    """
    parts = schedule.problem.costs.parts
    used = np.ones_like(parts)
    for program in schedule.programs:
        moved = program.table[of_kinds(program.table, Kind.O, Kind.D, Kind.R)]
        np.maximum.at(used, moved[:, STAGE], moved[:, PART] + 1)
    most = parts // used
    choices = [np.where((parts % n == 0) & (n <= most), n, 1) for n in range(2, int(most.max()))]
    choices.append(np.where(parts % used == 0, most, 1))
    for pieces in choices:
        if (pieces > 1).any():
            yield schedule.with_tables(partial(_divided, pieces=pieces))


def _divided(table: Table, pieces: Ints) -> Table:
    """A program in which each transfer of a stage is as many as `pieces` (S,) has."""
    count = np.where(of_kinds(table, Kind.O, Kind.D, Kind.R), pieces[table[:, STAGE]], 1)
    table = np.repeat(table, count, axis=0)
    nth = np.arange(len(table)) - np.repeat(np.cumsum(count) - count, count)
    table[:, PART] = table[:, PART] * np.repeat(count, count) + nth
    return table
