"""The engine's search: the whole problem, first with the micro-batches' order fixed, then without."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from fractions import Fraction

from optpipe.evaluate.objective import reaches
from optpipe.lift import lift
from optpipe.model.arrays import Floats
from optpipe.process.protocol import Note, Request
from optpipe.prune import prune
from optpipe.schedule import Schedule
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.exact import common_step_ms, serial_ms
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.incumbents import Emit, Incumbents
from optpipe_solver.milp.backend import is_licensed, minimize
from optpipe_solver.milp.model import Model
from optpipe_solver.milp.precedences import compute_ops
from optpipe_solver.milp.start import assignment
from optpipe_solver.milp.switches import ALL, Order, Switches
from optpipe_solver.milp.task import Limits, Outcome, Task

METHOD = "milp"
SHARE = 0.95  # of the time is for searches: how they ended must be told in time
ORDERS: dict[Order, str] = {  # of micro-batches that do not differ; others are in any order
    "stages": "micro-batches in one order in all stages",
    "entry": "micro-batches in the order in which they enter",
    "none": "micro-batches in any order",
}

# Compute ops up to which the program is written and solved, unless the user sets another limit or has a licence of
# Gurobi: 8 devices, 16 micro-batches, a quarter of a million rows. In a minute on one core HiGHS still improves a good
# start for 4x8 (96 ops).
MOST_OPS = 400


def solve(request: Request, emit: Emit, switches: Switches = ALL) -> None:
    """Solves the whole problem, unless it has more than `milp_ops` compute ops.

    Emits each schedule that is better than the warm start and those before, bounds that hold for every schedule, and
    notes: how each search ended, which schedules were rejected, and, once, that a backend is not available and HiGHS
    takes its place.
    """
    limits = Limits(time.monotonic() + SHARE * request.time_limit_s, request.threads, request.seed)
    search = _Search(request if switches.warm_start else request.model_copy(update={"warm_start": None}), emit)
    search.report("the first model was not written yet", ongoing=True)
    if switches.warm_start:
        search.ensure_start()
    ops, most = len(compute_ops(request.problem)), request.milp_ops
    if most is None and not is_licensed(request.solver):
        most = MOST_OPS
    if most is not None and ops > most:
        search.report(f"no search, as the problem has {ops} compute ops, and milp_ops = {most} are solved at most")
    else:
        search.run(limits, switches)


class _Search:
    """The best schedule and the best bound so far."""

    def __init__(self, request: Request, emit: Emit) -> None:
        self._request, self._problem, self._emit = request, request.problem, emit
        self.incumbents = Incumbents.of_engine(request, emit)
        self.incumbents.bound_ms = 0.0
        self._step_ms = common_step_ms(self._problem)
        self._notes: set[str] = set()

    def ensure_start(self) -> None:
        """Starts with AdaOffload's schedule where no other is known (section 4.1.3)."""
        if self.incumbents.best is None:
            self.incumbents.offer(next(STREAMS["adaoffload"](self._problem, self._request.objective)))

    def run(self, limits: Limits, switches: Switches) -> None:
        """Fixes the micro-batches' order first, then, where that may lose something, not."""
        request, solver, costs = self._request, self._request.solver, self._problem.costs
        orders: tuple[Order, ...] = ("stages", "entry") if switches.order == "stages" else (switches.order,)
        if len(costs.representatives) == self._problem.microbatches:  # no two are equal: there is no order to fix
            orders = ("none",)
        for order in orders:
            best, best_ms = self.incumbents.best, self.incumbents.best_ms
            is_limited = best is not None and request.objective == "makespan"
            horizon_ms = best_ms if is_limited else serial_ms(self._problem)  # no better schedule ends later
            model = Model(self._problem, request.objective, horizon_ms, replace(switches, order=order))
            told = f"equal {ORDERS[order]}" if order != "none" and not costs.are_equal else ORDERS[order]
            if model.possible:
                solver = self._solve(model, told, solver, limits)
            else:
                nothing = f"nothing shorter than {best_ms:.6g} ms" if best else "no schedule"
                self.report(f"{nothing} is possible, without a search, with {told}")
            proven = reaches(self.incumbents.best_ms, trivial_bound(request.problem, request.objective))
            if proven or model.is_bound or limits.seconds == 0.0:
                break
        if not model.is_bound and (reason := model.inexpressible):
            self.report(f"its optimum is no bound, as the model has {reason}; method auto has no such limits")

    def _solve(self, model: Model, told_order: str, solver: str, limits: Limits) -> str:
        """Solves a model, telling what is found on the way. Returns the backend that did it."""
        latest = Outcome("", "not ended")

        def report(outcome: Outcome) -> None:
            """Such as `HiGHS: optimal after 0.8 s and 17 nodes, best 21 ms, bound 21 ms; 165 variables, 590 rows`."""
            nonlocal latest
            latest, ongoing, best_ms = outcome, outcome.status == "not ended", self.incumbents.best_ms
            after = "" if ongoing else f" after {outcome.seconds:.1f} s"
            nodes = "" if outcome.nodes is None else f" and {outcome.nodes} nodes"
            best = "no schedule" if best_ms == math.inf else f"best {best_ms:.6g} ms"
            bound = "no bound" if outcome.bound is None else f"bound {outcome.bound / model.scale:.6g} ms"
            progress = f"{outcome.solver}: {outcome.status}{after}{nodes}, {best}, {bound}"
            self.report(f"{progress}; {model.rows.size}, with {told_order}", ongoing)

        def on_solution(x: Floats) -> None:
            self._offer(lift(self._problem, model.starts(x), METHOD))
            report(latest)

        def on_bound(value: float) -> None:
            if model.is_bound:
                self._offer_bound(value / model.scale)
            report(replace(latest, bound=value))

        def on_start(name: str) -> None:
            report(Outcome(name, "not ended"))

        start = assignment(model.variables, self.incumbents.best) if self.incumbents.best else {}
        task = Task(model.rows, model.C, start, limits, on_solution, on_bound, on_start)
        solver, outcome = minimize(solver, task, self._note)
        report(outcome)
        return solver

    def report(self, text: str, ongoing: bool = False) -> None:
        """A note on how a search ended, or how far it is, for whoever asked for this engine."""
        self._emit(Note(text=f"{METHOD}: {text}", method=METHOD, ongoing=ongoing))

    def _note(self, text: str) -> None:
        """Says something once."""
        if text not in self._notes:
            self._notes.add(text)
            self._emit(Note(text=text))

    def _offer_bound(self, least_ms: float) -> None:
        """A schedule's length is a sum of the problem's times, so a bound is raised to the next multiple of their
        common step."""
        self.incumbents.raise_bound(float(math.ceil(Fraction(least_ms) / self._step_ms) * self._step_ms), METHOD)

    def _offer(self, solution: Schedule) -> None:
        """Takes a schedule if it is better. One that does not fit or run becomes a note."""
        schedule = prune(solution)
        if wrong := self.incumbents.offer(schedule):
            self._note(f"a schedule of {schedule.method} was rejected: {wrong}")
