"""The engine's search: the whole problem, or windows of the best schedule."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from optpipe.evaluate.objective import reaches
from optpipe.model.arrays import Floats
from optpipe.model.problem import Problem
from optpipe.process.protocol import Bound, Frame, Note, Request
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.incumbent import BestSchedule
from optpipe_solver.lift import lift
from optpipe_solver.milp.backend import minimize
from optpipe_solver.milp.model import Model, serial_ms
from optpipe_solver.milp.neighbourhoods import search_windows
from optpipe_solver.milp.start import assignment
from optpipe_solver.milp.switches import ALL, Order, Switches
from optpipe_solver.milp.task import Limits, Task

METHOD = "milp"


def solve(request: Request, emit: Callable[[Frame], None], whole: bool, switches: Switches = ALL) -> None:
    """Solves the whole problem, or windows of the best schedule.

    Emits each schedule that is better than the warm start and those before, and bounds that hold for every schedule. If
    the request names a backend that is not available, one note says so and HiGHS takes its place.
    """
    limits = Limits(time.monotonic() + request.time_limit_s, request.threads, request.seed)
    search = _Search(request if switches.warm_start else request.model_copy(update={"warm_start": None}), emit)
    if whole:
        search.whole(limits, switches)
    else:
        search.windows(limits, switches)


class _Search:
    """The best schedule and the best bound so far."""

    def __init__(self, request: Request, emit: Callable[[Frame], None]) -> None:
        self._request, self._problem, self._emit = request, request.problem, emit
        self._best = BestSchedule(request, emit)
        self._step_ms = _common_step_ms(self._problem)
        self._bound_ms = 0.0

    def whole(self, limits: Limits, switches: Switches) -> None:
        """Fixes the micro-batches' order first, then, where that may lose something, not."""
        request, solver, best = self._request, self._request.solver, self._best
        orders: tuple[Order, ...] = ("stages", "entry") if switches.order == "stages" else (switches.order,)
        for order in orders:
            model = Model(request.problem, request.objective, self._horizon_ms(), replace(switches, order=order))
            if model.possible:
                start = assignment(model.variables, best.schedule) if best.schedule else {}
                callbacks = self._on_solution(model), self._on_bound(model), model.violated
                solver = minimize(solver, Task(model.rows, model.C, start, limits, *callbacks), self._note)
            if (
                reaches(best.value, trivial_bound(request.problem, request.objective))
                or model.is_bound
                or limits.seconds == 0.0
            ):
                break

    def windows(self, limits: Limits, switches: Switches) -> None:
        """Starts from the warm start or, if there is none, from AdaOffload's schedule."""
        best = self._best
        if best.schedule is None:
            best.offer(next(STREAMS["adaoffload"](self._problem, self._request.objective)))
        if best.schedule:
            search_windows(best.schedule, best.offer, self._request.solver, limits, switches, self._note)

    def _note(self, text: str) -> None:
        self._emit(Note(text=text))

    def _horizon_ms(self) -> float:
        """No schedule worth finding ends later."""
        known = self._best.schedule is not None and self._request.objective == "makespan"
        return self._best.value if known else serial_ms(self._problem)

    def _on_solution(self, model: Model) -> Callable[[Floats], None]:
        def offer(x: Floats) -> None:
            self._best.offer(lift(self._problem, model.starts(x), METHOD))

        return offer

    def _on_bound(self, model: Model) -> Callable[[float], None]:
        """A schedule's length is a sum of the problem's times, so a bound is raised to the next multiple of their
        common step."""

        def emit(value: float) -> None:
            bound = math.ceil(Fraction(value / model.scale) / self._step_ms) * self._step_ms
            if model.is_bound and bound > self._bound_ms:
                self._bound_ms = float(bound)
                self._emit(Bound(method=METHOD, lower_bound_ms=self._bound_ms))

        return emit


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
