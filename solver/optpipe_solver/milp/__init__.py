"""OptPipe's mixed-integer linear program: the reference formulation. It proves what is small; it does not scale."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.process.protocol import Bound, Note, Request
from optpipe_solver.keeper import Keeper
from optpipe_solver.milp.switches import ALL, Order, Switches

if TYPE_CHECKING:
    from optpipe.model.arrays import Floats
    from optpipe.process.protocol import Frame
    from optpipe_solver.milp.backend import Limits
    from optpipe_solver.milp.model import Model

METHOD = "milp"
# compute ops; in a minute on one core HiGHS still improves a good start for 4x8 (96), but not for 6x8 or 4x12 (144)
MOST_OPS = 100


def applies(problem: Problem) -> bool:
    """Whether the whole problem is small enough for one model, and of a kind that the model describes."""
    return improves(problem) and 3 * sum(len(problem.route(j)) for j in range(problem.microbatches)) <= MOST_OPS


def improves(problem: Problem) -> bool:
    """Whether the model describes the problem, so that windows of a schedule can be solved, whatever its size: every
    compute op takes time (two that take none could stand in either order at one moment), nothing is evicted to a peer,
    and host memory holds all that could be offloaded."""
    costs, passes = problem.costs, [problem.route(j) for j in range(problem.microbatches)]
    if costs.can_evict.any() or not (costs.ms[[Kind.F, Kind.B, Kind.W]] > 0).all():
        return False
    pinned = [0] * len(problem.devices)
    for s in (s for route in passes for s in route if costs.can_offload[s]):
        pinned[costs.device[s]] += int(costs.offload[s])
    return all(size <= limit for size, limit in zip(pinned, costs.host_memory.tolist(), strict=True))


def run(request: Request, emit: Callable[[Frame], None], switches: Switches = ALL) -> None:
    """Solves a small problem whole; of a larger one the best schedule, window by window. Emits what it finds.

    An incumbent is emitted when it is better than those before it and than the warm start, a bound only where it holds
    for every schedule. A backend that the request names and that is not to be had is told of in one note, and HiGHS
    takes its place.
    """
    from optpipe_solver.milp.backend import Limits

    limits = Limits(time.monotonic() + request.time_limit_s, request.threads, request.seed)
    search = _Search(request if switches.warm_start else request.model_copy(update={"warm_start": None}), emit)
    if applies(request.problem):
        search.whole(limits, switches)
    else:
        search.windows(limits, switches)


class _Search:
    """What has been told of: the best schedule, by its keeper, and the best bound."""

    def __init__(self, request: Request, emit: Callable[[Frame], None]) -> None:
        self._request, self._problem, self._emit = request, request.problem, emit
        self._keeper = Keeper(request, emit)
        self._grid = _grid(self._problem)
        self._bound_ms = 0.0

    def whole(self, limits: Limits, switches: Switches) -> None:
        """First with the micro-batches' order fixed, then, where that may lose something, without."""
        from optpipe_solver.bounds import trivial_bound
        from optpipe_solver.milp.backend import Task, minimize
        from optpipe_solver.milp.model import Model
        from optpipe_solver.milp.start import assignment

        request, solver = self._request, self._request.solver
        orders: tuple[Order, ...] = ("stages", "entry") if switches.order == "stages" else (switches.order,)
        for order in orders:
            model = Model(request.problem, request.objective, self._horizon_ms(), replace(switches, order=order))
            if model.windows.possible:
                start = assignment(model, self._keeper.best) if self._keeper.best else {}
                task = Task(
                    model.rows, model.C, start, limits, self._on_solution(model), self._on_bound(model), model.violated
                )
                solver = minimize(solver, task, self._tell)
            optimal = self._keeper.value <= trivial_bound(request.problem, request.objective) * (1 + 1e-9)
            if optimal or model.is_bound or limits.seconds == 0.0:
                break

    def windows(self, limits: Limits, switches: Switches) -> None:
        """From the warm start or, where there is none, from AdaOffload's schedule."""
        from optpipe_solver.heuristics import STREAMS
        from optpipe_solver.milp.neighbourhoods import search_windows

        if self._keeper.best is None:
            self._keeper.offer(next(STREAMS["adaoffload"](self._problem, self._request.objective)))
        if self._keeper.best:
            search_windows(self._keeper.best, self._keeper.offer, self._request.solver, limits, switches, self._tell)

    def _tell(self, text: str) -> None:
        self._emit(Note(text=text))

    def _horizon_ms(self) -> float:
        """No schedule worth finding ends later."""
        from optpipe_solver.milp.model import serial_ms

        return (
            self._keeper.value
            if self._keeper.best and self._request.objective == "makespan"
            else serial_ms(self._problem)
        )

    def _on_solution(self, model: Model) -> Callable[[Floats], None]:
        from optpipe_solver.lift import lift

        def offer(x: Floats) -> None:
            self._keeper.offer(lift(self._problem, model.starts(x), METHOD))

        return offer

    def _on_bound(self, model: Model) -> Callable[[float], None]:
        """A schedule's length is a sum of the problem's times, so a bound can be raised to the next multiple of their
        grid."""

        def emit(value: float) -> None:
            bound = math.ceil(Fraction(value / model.scale) / self._grid) * self._grid
            if model.is_bound and bound > self._bound_ms:
                self._bound_ms = float(bound)
                self._emit(Bound(method=METHOD, lower_bound_ms=self._bound_ms))

        return emit


def _grid(problem: Problem) -> Fraction:
    """The largest step, in ms, of which every time of the problem is a multiple; times count as the decimals that they
    are written as."""
    times = {Fraction(repr(problem.p2p_ms))}
    for stage in problem.stages:
        times |= {Fraction(repr(ms)) for ms in (stage.forward_ms, stage.backward_input_ms, stage.backward_weight_ms)}
        times |= {Fraction(repr(ms)) for ms in (stage.offload_ms, stage.reload_ms) if ms is not None}
    positive = [ms for ms in times if ms > 0]
    common = math.lcm(*(ms.denominator for ms in positive))
    return Fraction(math.gcd(*(int(ms * common) for ms in positive)), common)
