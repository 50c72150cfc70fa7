"""The engine's search: windows of the best schedule, then the whole problem, first with the micro-batches' order fixed,
then without."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np

from optpipe.evaluate.objective import NO_SCHEDULE_MS, length_ms, reaches, shorter
from optpipe.lift import lift, prune
from optpipe.model.arrays import Floats
from optpipe.process.protocol import Note, Request
from optpipe.schedule import check
from optpipe_solver.bounds import lower_bound
from optpipe_solver.clock import Clock
from optpipe_solver.exact import common_step_ms, serial_ms
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.incumbents import Emit, Incumbents
from optpipe_solver.milp.backends import MARGIN, Outcome, Task, is_licensed, minimize, most_rows
from optpipe_solver.milp.model import Model, inexpressible, order_is_free
from optpipe_solver.milp.paths import MicrobatchOrder, compute_ops
from optpipe_solver.milp.reading import Reading
from optpipe_solver.milp.variables import ALL, Switches, Units, assignment
from optpipe_solver.milp.windows import FEWEST_OPS, FIRST_OPS, MOST_S, WindowChoice

METHOD = "milp"
SHARE = 0.95  # of the time is for searches: the report on how they ended must be in time
ORDERS: dict[MicrobatchOrder, str] = {  # of micro-batches that do not differ; others are in any order
    "stages": "micro-batches in one order in all stages",
    "entry": "micro-batches in the order in which they enter",
    "none": "micro-batches in any order",
}

LEAST_GAIN = 1e-4  # of the length, in a window
STEP_SHARE = 0.99  # of the step between lengths: what is left of it is more than solvers' tolerances
WINDOWS_SHARE = 0.5  # of the time at most, if the whole problem follows
PAIRS_PER_S, ROWS_PER_S = 1e7, 2e4  # of ops, to find longest paths; to write; half of what a quiet machine does
VAIN_S = 1.0  # of windows that shorten nothing, until the whole problem follows

# Compute ops up to which the whole problem is solved, unless the user sets another limit or has a licence of
# Gurobi: 8 devices, 16 micro-batches, a quarter of a million rows. In a minute on one core HiGHS still improves a good
# start for 4x8 (96 ops).
MOST_OPS = 400


def solve(request: Request, emit: Emit, switches: Switches = ALL) -> float | None:
    """Solves windows of the best schedule and, if it has `milp_ops` compute ops at most, the whole problem.

    Emits each schedule that is better than the warm start and those before, bounds that hold for every schedule, and
    notes: how each search ended, which schedules were rejected, and, once, that a backend is not available and HiGHS
    takes its place. Returns the seconds of counted work; None where the wall's time counts.
    """
    clock = Clock.for_request(request).share(SHARE)
    search = _Search(request if switches.warm_start else request.model_copy(update={"warm_start": None}), emit)
    search.report("the first model was not written yet", ongoing=True)
    if switches.warm_start and search.incumbents.best is None:  # section 4.1.3
        search.incumbents.offer(next(STREAMS["adaoffload"](request.problem, request.objective)))
    ops, most = len(compute_ops(request.problem)), request.milp_ops
    if most is None and not is_licensed(request.solver):
        most = MOST_OPS
    is_whole = most is None or ops <= most
    if search.incumbents.best and (ops > FIRST_OPS or not is_whole):
        windows_clock = clock.share(WINDOWS_SHARE) if is_whole else clock
        search.improve(windows_clock, VAIN_S if is_whole else math.inf, switches)
        if is_whole:
            clock.spend(windows_clock.spent_s or 0.0)
    if is_whole:
        search.run(clock, switches)
    else:
        search.report(f"no search of the whole, as it has {ops} compute ops, and milp_ops = {most}")
    return clock.spent_s


class _Search:
    """The best schedule and the best bound so far."""

    def __init__(self, request: Request, emit: Emit) -> None:
        self._request, self._problem, self._emit = request, request.problem, emit
        self.incumbents = Incumbents.of_engine(request, emit)
        self.incumbents.bound_ms = 0.0
        self._step_ms = common_step_ms(self._problem)
        self._bound_ms = lower_bound(self._problem, request.objective)
        self._own_ms = NO_SCHEDULE_MS  # of the shortest schedule that the program itself has
        self._notes: set[str] = set()

    def improve(self, clock: Clock, most_vain_s: float, switches: Switches) -> None:
        """Solves windows of the best schedule, without triangle cuts, as that is sooner, until so many seconds gained
        nothing."""
        switches = replace(switches, triangles="none")
        choice, solver = WindowChoice(self._problem, self._request.seed), self._request.solver
        solved, gained, vain_s = 0, 0, 0.0
        text = "no window was solved"
        while self.incumbents.best and vain_s < most_vain_s and not (clock.over or (self._proven and solved)):
            before_ms, reading = self.incumbents.best_ms, Reading(self.incumbents.best, "none")
            window, is_strict = choice.window(reading), self._own_ms < math.inf
            horizon_ms = self._horizon_ms * (1 - LEAST_GAIN * is_strict)
            model = Model(self._problem, self._request.objective, horizon_ms, switches, window=window)
            outcome, within = Outcome("", "infeasible"), Clock(min(MOST_S, clock.left_s), clock.counts, whole=clock)
            within.count(len(reading.compute) ** 2, PAIRS_PER_S)
            if model.possible and len(window.free) > FEWEST_OPS and model.reduced[0].length > most_rows(solver):
                outcome = Outcome("", "ended")
            elif model.possible:
                solver, outcome = self._solve(model, solver, within, lambda outcome: None)
                solved += 1
                text = f"the last by {outcome.solver} of {model.reduced[0].size}"
            decided = outcome.status in ("optimal", "infeasible")
            seconds = within.passed_s if within.spent_s is None else within.spent_s
            clock.spend(seconds)
            choice.learn(decided, seconds)
            vain_s += seconds
            if self.incumbents.best_ms < before_ms:
                gained, vain_s = gained + 1, 0.0
            elif decided and len(window.free) == len(reading.compute) and is_strict:
                break
            self.report(f"{solved} windows, {gained} of them shorter, {self._own_best}; {text}", ongoing=True)
        self.report(f"{solved} windows, {gained} of them shorter, {self._own_best}; {text}" if solved else text)

    def run(self, clock: Clock, switches: Switches) -> None:
        """Fixes the micro-batches' order first, then, where that may lose something, not."""
        solver, costs = self._request.solver, self._problem.costs
        rounds = not Units(self._problem).lossless
        reason = inexpressible(self._problem)
        models = self._models(switches.order, rounds and not reason)
        for order, down in models if not self._proven or self._own_ms == math.inf else ():
            best, best_ms = self.incumbents.best, self.incumbents.best_ms
            switches = replace(switches, order=order)
            model = Model(self._problem, self._request.objective, self._horizon_ms, switches, down)
            name = f"equal {ORDERS[order]}" if order != "none" and not costs.are_equal else ORDERS[order]
            name += f", sizes rounded {'down' if down else 'up'} to MiB" if rounds else ""
            if model.possible:
                solver, _ = self._solve(model, solver, clock, partial(self._report_model, model, name))
            else:
                if model.is_bound and best:
                    self.incumbents.raise_bound(best_ms, METHOD)
                nothing = f"nothing shorter than {best_ms:.6g} ms" if best else "no schedule"
                self.report(f"{nothing} is possible, without a search, with {name}")
            if self._proven or model.is_bound or clock.over:
                break
        if self._proven and not reason:  # by the bound that is a row of the model
            self.incumbents.raise_bound(self._bound_ms, METHOD)
        if reason:
            self.report(f"its optimum is no bound, as the model has {reason}; method auto has no such limits")

    @property
    def _proven(self) -> bool:
        return reaches(self.incumbents.best_ms, self._bound_ms)

    @property
    def _horizon_ms(self) -> float:
        """No better schedule ends later. What is as long as the program's own best is none; lengths differ by steps."""
        if self.incumbents.best is None or self._request.objective != "makespan":
            return serial_ms(self._problem)
        return self.incumbents.best_ms - (float(self._step_ms) / 2 if self._has_best else 0.0)

    @property
    def _has_best(self) -> bool:
        """Whether the program itself has a schedule as short as the best one."""
        return self._own_ms < math.inf and not shorter(self.incumbents.best_ms, self._own_ms)

    def _in_steps(self, bound_ms: float) -> float:
        """A length is a sum of the problem's times, so a multiple of their common step."""
        return float(math.ceil(Fraction(bound_ms) / self._step_ms) * self._step_ms)

    @property
    def _own_best(self) -> str:
        return "no schedule of its own" if self._own_ms == math.inf else f"its own best {self._own_ms:.6g} ms"

    def _models(self, order: MicrobatchOrder, needs_down: bool) -> list[tuple[MicrobatchOrder, bool]]:
        """The orders of micro-batches to search in turn, each with whether sizes are rounded down: where they have to
        be rounded for bounds, the last search is for bounds."""
        orders: list[MicrobatchOrder] = ["stages", "entry"] if order == "stages" else [order]
        if len(self._problem.costs.representatives) == self._problem.microbatches:
            orders = ["none"]  # no two micro-batches are equal: there is no order to fix
        if not needs_down:
            return [(order, False) for order in orders]
        is_free = order_is_free(self._problem, self._request.objective)
        return [(orders[0], False), (orders[0] if is_free else orders[-1], True)]

    def _report_model(self, model: Model, name: str, outcome: Outcome) -> None:
        """Such as `HiGHS: optimal after 0.8 s and 17 nodes, its own best 21 ms, bound 21 ms; 165 ...`."""
        ongoing = outcome.status == "not ended"
        after = "" if ongoing else f" after {outcome.seconds:.1f} s"
        nodes = "" if outcome.nodes is None else f" and {outcome.nodes} nodes"
        bound = "no bound"
        if outcome.bound is not None:
            bound = f"bound {self._in_steps(outcome.bound / model.scale * (1 - MARGIN)):.6g} ms"
        progress = f"{outcome.solver}: {outcome.status}{after}{nodes}, {self._own_best}, {bound}"
        self.report(f"{progress}; {model.reduced[0].size}, with {name}", ongoing)

    def _solve(self, model: Model, solver: str, clock: Clock, report: Callable[[Outcome], None]) -> tuple[str, Outcome]:
        """Solves a model and reports on the way. Returns the backend that did it, and how it ended."""
        latest = Outcome("", "not ended")
        rows, kept = model.reduced
        clock.count(len(model.rows.at_least), ROWS_PER_S)
        number = {var: k for k, var in enumerate(kept.tolist())}

        def report_bound(outcome: Outcome) -> None:
            nonlocal latest
            latest = outcome
            report(outcome)

        def on_solution(x: Floats) -> None:
            values = np.zeros(len(model.rows.lower))
            values[kept] = x
            schedule = prune(lift(self._problem, model.starts(values), METHOD))
            wrong = self.incumbents.offer(schedule)
            if not wrong and not check(self._problem, schedule):  # one that is no better was not checked
                self._own_ms = min(self._own_ms, length_ms(schedule, self._request.objective))
            if wrong and not model.units.down:  # rounded down, what does not fit may seem to fit
                self._note(f"a schedule of {METHOD} was rejected: {wrong}")
            report(latest)

        def on_bound(value: float) -> None:
            if model.is_bound:
                self.incumbents.raise_bound(self._in_steps(value / model.scale), METHOD)
            report_bound(replace(latest, bound=value))

        best = self.incumbents.best
        is_strict = self._has_best and self._request.objective == "makespan"  # the best itself is no solution
        start = assignment(model.variables, best) if best and not is_strict else {}
        task = Task(
            rows=rows,
            objective=number[model.variables.length],
            start={number[var]: value for var, value in start.items() if var in number},
            clock=clock,
            threads=self._request.threads,
            seed=self._request.seed,
            gap=max(1e-6, STEP_SHARE * float(self._step_ms) * model.scale),
            on_solution=on_solution,
            on_bound=on_bound,
            on_start=lambda solver: report_bound(Outcome(solver, "not ended")),
        )
        solver, outcome = minimize(solver, task, self._note)
        if outcome.status == "infeasible" and is_strict:  # nothing is shorter than what the program has
            outcome = replace(outcome, status="optimal", bound=self.incumbents.best_ms * model.scale)
            if model.is_bound:
                self.incumbents.raise_bound(self.incumbents.best_ms, METHOD)
        report(outcome)
        return solver, outcome

    def report(self, text: str, ongoing: bool = False) -> None:
        """A note on how a search ended, or how far it is, for whoever asked for this engine."""
        self._emit(Note(text=f"{METHOD}: {text}", method=METHOD, ongoing=ongoing))

    def _note(self, text: str) -> None:
        """A note, once."""
        if text not in self._notes:
            self._notes.add(text)
            self._emit(Note(text=text))
