"""The engine's search: the whole problem, or windows of the best schedule."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from optpipe.evaluate.objective import length_ms, reaches, shorter
from optpipe.lift import lift
from optpipe.model.arrays import Floats
from optpipe.model.problem import Problem
from optpipe.process.protocol import Bound, Frame, Note, Request
from optpipe.schedule import Schedule, check
from optpipe_solver.bounds import lower_bound, trivial_bound
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.incumbent import BestSchedule
from optpipe_solver.milp.backend import is_licensed, minimize, most_rows, smallest_model
from optpipe_solver.milp.lasting import Lasting
from optpipe_solver.milp.model import Model, serial_ms
from optpipe_solver.milp.neighbourhoods import WindowSearch
from optpipe_solver.milp.size import MOST_OPS, count_ops
from optpipe_solver.milp.start import assignment
from optpipe_solver.milp.switches import ALL, Order, Switches
from optpipe_solver.milp.task import Limits, Outcome, Task

METHOD = "milp"
SHARE = 0.95  # of the time is for searches: how they ended must be told in time
ORDERS: dict[Order, str] = {
    "stages": "micro-batches in one order in all stages",
    "entry": "micro-batches in the order in which they enter",
    "none": "micro-batches in any order",
}


def solve(request: Request, emit: Callable[[Frame], None], switches: Switches = ALL) -> None:
    """Solves the whole problem or, if it has more than `milp_ops` compute ops, windows of the best schedule.

    Emits each schedule that is better than the warm start and those before, bounds that hold for every schedule, and
    notes: how each search ended, which schedules were rejected, and, once, that a backend is not available and HiGHS
    takes its place.
    """
    limits = Limits(time.monotonic() + SHARE * request.time_limit_s, request.threads, request.seed)
    emit(Note(text=f"{METHOD}: the first model was not written yet", method=METHOD, ongoing=True))
    search = _Search(request if switches.warm_start else request.model_copy(update={"warm_start": None}), emit)
    most = request.milp_ops or (None if is_licensed(request.solver) else MOST_OPS)
    if (most is not None and count_ops(request.problem) > most) or not search.whole(limits, switches):
        search.windows(limits, switches)


class _Search:
    """The best schedule and the best bound so far."""

    def __init__(self, request: Request, emit: Callable[[Frame], None]) -> None:
        self._request, self._problem, self._emit = request, request.problem, emit
        self.best = BestSchedule(request, emit)
        self.lasting = Lasting(request.problem)
        self._step_ms = _common_step_ms(self._problem)
        self._bound_ms = 0.0
        self._told: set[str] = set()

    def whole(self, limits: Limits, switches: Switches) -> bool:
        """Fixes the micro-batches' order first, then, where that may lose something, not.

        Returns False at once if the backend takes no model of that size.
        """
        request, solver, best = self._request, self._request.solver, self.best
        orders: tuple[Order, ...] = ("stages", "entry") if switches.order == "stages" else (switches.order,)
        most = most_rows(solver)
        switches = smallest_model(solver, switches)
        for order in orders:
            model = Model(self.lasting.problem, request.objective, self._horizon_ms(), replace(switches, order=order))
            if most and model.possible and not model.rows.fits(most):
                self.report(f"windows, as the whole model has {_size(model)}, and Gurobi's pip licence is for {most}")
                return False
            if model.possible:
                start = assignment(model.variables, self._on_model(best.schedule)) if best.schedule else {}
                own = replace(limits, since=time.monotonic())
                told = _Told(self, model, order)
                callbacks = told.on_solution, told.on_bound, model.violated, told.on_start
                solver, outcome = minimize(solver, Task(model.rows, model.C, start, own, *callbacks), self.note)
                told.report(outcome)
            else:
                found = f"nothing shorter than {best.value:.6g} ms" if best.schedule else "no schedule"
                self.report(f"{found} is possible, without a search, with {ORDERS[order]}")
            if (
                reaches(best.value, trivial_bound(request.problem, request.objective))
                or model.is_bound
                or limits.seconds == 0.0
            ):
                break
        if not model.is_bound and (reason := model.inexpressible):
            self.report(f"its optimum is no bound, as the model has {reason}; method auto has no such limits")
        return True

    def windows(self, limits: Limits, switches: Switches) -> None:
        """Starts from the warm start or, if there is none, from AdaOffload's schedule."""
        best, objective = self.best, self._request.objective
        if best.schedule is None:
            best.offer(next(STREAMS["adaoffload"](self._problem, objective)))
        if best.schedule is None:
            return
        bound = lower_bound(self._problem, objective)

        def report(ongoing: bool = True) -> None:
            self.report(f"{search.summary}; {best.value:.6g} ms", ongoing)

        search = WindowSearch(self.offer, self._request.solver, limits, switches, self.note, report, objective, bound)
        report()
        search.run(self._on_model(best.schedule))
        report(ongoing=False)

    def note(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._emit(Note(text=text))

    def report(self, text: str, ongoing: bool = False) -> None:
        """A note on how a search ended, or how far it is, for whoever asked for this engine."""
        self._emit(Note(text=f"{METHOD}: {text}", method=METHOD, ongoing=ongoing))

    def take_bound(self, least_ms: float) -> None:
        """A schedule's length is a sum of the problem's times, so a bound is raised to the next multiple of their
        common step."""
        bound = math.ceil(Fraction(least_ms) / self._step_ms) * self._step_ms
        if bound > self._bound_ms:
            self._bound_ms = float(bound)
            self._emit(Bound(method=METHOD, lower_bound_ms=self._bound_ms))

    def _horizon_ms(self) -> float:
        """No schedule worth finding ends later."""
        known = self.best.schedule is not None and self._request.objective == "makespan"
        return self.best.value + self.lasting.slack_ms if known else serial_ms(self.lasting.problem)

    def _on_model(self, schedule: Schedule) -> Schedule:
        return replace(schedule, problem=self.lasting.problem)

    def offer(self, found: Schedule) -> bool:
        """Takes a schedule of the model if it is better. One that does not fit or run becomes a note."""
        schedule = replace(found, problem=self._problem)
        if shorter(length_ms(schedule, self._request.objective), self.best.value) and (
            wrong := check(self._problem, schedule)
        ):
            self.note(f"a schedule of {found.method} was rejected: {wrong[0]}")
            return False
        return self.best.offer(schedule)


class _Told:
    """What the search of one model tells: schedules, bounds, and how far it is or how it ended."""

    def __init__(self, search: _Search, model: Model, order: Order) -> None:
        self._search, self._model, self._order = search, model, order
        self._outcome = Outcome("", "not ended")

    def on_start(self, solver: str) -> None:
        self.report(Outcome(solver, "not ended"))

    def on_solution(self, x: Floats) -> None:
        self._search.offer(lift(self._model.problem, self._model.starts(x), METHOD))
        self.report(self._outcome)

    def on_bound(self, value: float) -> None:
        if self._model.is_bound:
            self._search.take_bound(self._least_ms(value))
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
        reached = f"{outcome.solver}: {outcome.status}{after}{nodes}, {best}, {bound}"
        self._search.report(f"{reached}; {_size(self._model)}, with {ORDERS[self._order]}", ongoing)


def _size(model: Model) -> str:
    return f"{len(model.rows.lower)} variables, {len(model.rows.at_least)} rows"


def _common_step_ms(problem: Problem) -> Fraction:
    """The largest step of which every time of the problem is a multiple. Times count as the decimals that they are
    written as."""
    times = {Fraction(repr(problem.p2p_ms))}
    for stage in problem.stages:
        times |= {Fraction(repr(ms)) for ms in (stage.forward_ms, stage.backward_input_ms, stage.backward_weight_ms)}
        times |= {Fraction(repr(ms)) for ms in (stage.offload_ms, stage.reload_ms) if ms is not None}
    positive = [ms for ms in times if ms > 0]
    common = math.lcm(*(ms.denominator for ms in positive))
    return Fraction(math.gcd(*(int(ms * common) for ms in positive)), common)
