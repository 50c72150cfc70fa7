"""The engine's search: the whole problem, first with the micro-batches' order fixed, then without."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np

from optpipe.evaluate.objective import length_ms, reaches, shorter
from optpipe.lift import lift
from optpipe.model.arrays import Floats
from optpipe.model.problem import Problem
from optpipe.process.protocol import Bound, Frame, Note, Request
from optpipe.prune import prune
from optpipe.schedule import Schedule, check
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.incumbent import BestSchedule
from optpipe_solver.milp.backend import is_licensed, minimize
from optpipe_solver.milp.lasting import Lasting
from optpipe_solver.milp.model import Model, serial_ms
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


def count_compute_ops(problem: Problem) -> int:
    """How many compute ops the model has to order."""
    return 3 * sum(len(problem.route(j)) for j in range(problem.microbatches))


def solve(request: Request, emit: Callable[[Frame], None], switches: Switches = ALL) -> None:
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
    ops, most = count_compute_ops(request.problem), request.milp_ops
    if most is None and not is_licensed(request.solver):
        most = MOST_OPS
    if most is not None and ops > most:
        search.report(f"no search, as the problem has {ops} compute ops, and milp_ops = {most} are solved at most")
    else:
        search.run(limits, switches)


class _Search:
    """The best schedule and the best bound so far."""

    def __init__(self, request: Request, emit: Callable[[Frame], None]) -> None:
        self._request, self._problem, self._emit = request, request.problem, emit
        self.best = BestSchedule(request, emit)
        self.lasting = Lasting(request.problem)
        self._step_ms = _common_step_ms(self._problem)
        self._bound_ms = 0.0
        self._notes: set[str] = set()

    def ensure_start(self) -> None:
        """Starts with AdaOffload's schedule where no other is known (section 4.1.3)."""
        if self.best.schedule is None:
            self.best.offer(next(STREAMS["adaoffload"](self._problem, self._request.objective)))

    def run(self, limits: Limits, switches: Switches) -> None:
        """Fixes the micro-batches' order first, then, where that may lose something, not."""
        request, solver, best = self._request, self._request.solver, self.best
        costs = self._problem.costs
        orders: tuple[Order, ...] = ("stages", "entry") if switches.order == "stages" else (switches.order,)
        if len(costs.examples) == self._problem.microbatches:  # no two are equal: there is no order to fix
            orders = ("none",)
        for order in orders:
            model = Model(self.lasting.problem, request.objective, self._horizon_ms(), replace(switches, order=order))
            if model.possible:
                start = assignment(model.variables, self._on_model(best.schedule)) if best.schedule else {}
                progress = _Progress(self, model, order)
                task = Task(
                    model.rows,
                    model.C,
                    start,
                    replace(limits, since=time.monotonic()),
                    progress.on_solution,
                    progress.on_bound,
                    progress.on_start,
                )
                solver, outcome = minimize(solver, task, self.note)
                progress.report(outcome)
            else:
                nothing = f"nothing shorter than {best.value:.6g} ms" if best.schedule else "no schedule"
                self.report(f"{nothing} is possible, without a search, with {self.told_order(order)}")
            proven = reaches(best.value, trivial_bound(request.problem, request.objective))
            if proven or model.is_bound or limits.seconds == 0.0:
                break
        if not model.is_bound and (reason := model.inexpressible):
            self.report(f"its optimum is no bound, as the model has {reason}; method auto has no such limits")

    def told_order(self, order: Order) -> str:
        some_differ = order != "none" and not self._problem.costs.are_equal
        return f"equal {ORDERS[order]}" if some_differ else ORDERS[order]

    def note(self, text: str) -> None:
        """Says something once."""
        if text not in self._notes:
            self._notes.add(text)
            self._emit(Note(text=text))

    def report(self, text: str, ongoing: bool = False) -> None:
        """A note on how a search ended, or how far it is, for whoever asked for this engine."""
        self._emit(Note(text=f"{METHOD}: {text}", method=METHOD, ongoing=ongoing))

    def offer_bound(self, least_ms: float) -> None:
        """A schedule's length is a sum of the problem's times, so a bound is raised to the next multiple of their
        common step."""
        bound = math.ceil(Fraction(least_ms) / self._step_ms) * self._step_ms
        if bound > self._bound_ms:
            self._bound_ms = float(bound)
            self._emit(Bound(method=METHOD, lower_bound_ms=self._bound_ms))

    def offer_schedule(self, on_model: Schedule) -> None:
        """Takes a schedule of the model if it is better. One that does not fit or run becomes a note."""
        schedule = prune(replace(on_model, problem=self._problem))
        if shorter(length_ms(schedule, self._request.objective), self.best.value) and (
            complaints := check(self._problem, schedule)
        ):
            self.note(f"a schedule of {schedule.method} was rejected: {complaints[0]}")
        else:
            self.best.offer(schedule)

    def _horizon_ms(self) -> float:
        """No schedule worth finding ends later."""
        is_limited = self.best.schedule is not None and self._request.objective == "makespan"
        return self.best.value + self.lasting.slack_ms if is_limited else serial_ms(self.lasting.problem)

    def _on_model(self, schedule: Schedule) -> Schedule:
        return replace(schedule, problem=self.lasting.problem)


class _Progress:
    """What the search of one model tells: schedules, bounds, and how far it is or how it ended."""

    def __init__(self, search: _Search, model: Model, order: Order) -> None:
        self._search, self._model, self._order = search, model, order
        self._outcome = Outcome("", "not ended")

    def on_start(self, solver: str) -> None:
        self.report(Outcome(solver, "not ended"))

    def on_solution(self, x: Floats) -> None:
        self._search.offer_schedule(lift(self._model.problem, self._model.starts(x), METHOD))
        self.report(self._outcome)

    def on_bound(self, value: float) -> None:
        if self._model.is_bound:
            self._search.offer_bound(self._least_ms(value))
        self.report(replace(self._outcome, bound=value))

    def _least_ms(self, value: float) -> float:
        """A bound on the problem's own schedules, of a value of the model's objective."""
        return float(value / self._model.scale - self._search.lasting.slack_ms)

    def report(self, outcome: Outcome) -> None:
        """Such as `HiGHS: optimal after 0.8 s and 17 nodes, best 21 ms, bound 21 ms; 165 variables, 590 rows`."""
        self._outcome = outcome
        ongoing, best_ms = outcome.status == "not ended", self._search.best.value
        after = "" if ongoing else f" after {outcome.seconds:.1f} s"
        nodes = "" if outcome.nodes is None else f" and {outcome.nodes} nodes"
        best = "no schedule" if best_ms == math.inf else f"best {best_ms:.6g} ms"
        bound = "no bound" if outcome.bound is None else f"bound {self._least_ms(outcome.bound):.6g} ms"
        progress = f"{outcome.solver}: {outcome.status}{after}{nodes}, {best}, {bound}"
        self._search.report(
            f"{progress}; {self._model.rows.size}, with {self._search.told_order(self._order)}", ongoing
        )


def _common_step_ms(problem: Problem) -> Fraction:
    """The largest step of which every time of the problem is a multiple. Times count as the decimals that they are
    written as."""
    figures = [problem.p2p_ms, *(message.ms for message in problem.messages or ())]
    for stage in problem.stages:
        figures += [stage.forward_ms, stage.backward_input_ms, stage.backward_weight_ms]
        figures += [ms for ms in (stage.offload_ms, stage.reload_ms) if ms is not None]
    times = {Fraction(repr(float(ms))) for figure in figures for ms in np.atleast_1d(figure)}
    positive = [ms for ms in times if ms > 0]
    common = math.lcm(*(ms.denominator for ms in positive))
    return Fraction(math.gcd(*(int(ms * common) for ms in positive)), common)
