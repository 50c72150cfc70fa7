"""The engine's search: the whole problem, first with the micro-batches' order fixed, then without; and how a schedule
becomes a start for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from optpipe.evaluate.objective import NO_SCHEDULE_MS, length_ms, reaches
from optpipe.lift import lift, prune
from optpipe.model.arrays import Floats
from optpipe.model.ops import Kind, Op
from optpipe.model.program import KIND, MICROBATCH, PART, STAGE
from optpipe.process.protocol import Note, Request
from optpipe.schedule import Schedule, check
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.clock import Clock
from optpipe_solver.exact import common_step_ms, serial_ms
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.incumbents import Emit, Incumbents
from optpipe_solver.milp.backends import Outcome, Task, is_licensed, minimize
from optpipe_solver.milp.model import Model, inexpressible, order_is_free
from optpipe_solver.milp.rows import Literal
from optpipe_solver.milp.variables import (
    ALL,
    Activation,
    MicrobatchOrder,
    Switches,
    Units,
    Variables,
    compute_ops,
    equal_microbatches,
)

METHOD = "milp"
SHARE = 0.95  # of the time is for searches: the report on how they ended must be in time
ORDERS: dict[MicrobatchOrder, str] = {  # of micro-batches that do not differ; others are in any order
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
    clock = Clock(SHARE * request.time_limit_s)
    search = _Search(request if switches.warm_start else request.model_copy(update={"warm_start": None}), emit)
    search.report("the first model was not written yet", ongoing=True)
    if switches.warm_start and search.incumbents.best is None:  # section 4.1.3
        search.incumbents.offer(next(STREAMS["adaoffload"](request.problem, request.objective)))
    ops, most = len(compute_ops(request.problem)), request.milp_ops
    if most is None and not is_licensed(request.solver):
        most = MOST_OPS
    if most is not None and ops > most:
        search.report(f"no search, as the problem has {ops} compute ops, and milp_ops = {most} are solved at most")
    else:
        search.run(clock, switches)


class _Search:
    """The best schedule and the best bound so far."""

    def __init__(self, request: Request, emit: Emit) -> None:
        self._request, self._problem, self._emit = request, request.problem, emit
        self.incumbents = Incumbents.of_engine(request, emit)
        self.incumbents.bound_ms = 0.0
        self._step_ms = common_step_ms(self._problem)
        self._own_ms = NO_SCHEDULE_MS  # of the shortest schedule that the program itself has
        self._notes: set[str] = set()

    def run(self, clock: Clock, switches: Switches) -> None:
        """Fixes the micro-batches' order first, then, where that may lose something, not."""
        request, solver, costs = self._request, self._request.solver, self._problem.costs
        rounds = not Units(self._problem).lossless
        reason = inexpressible(self._problem)
        for order, down in self._models(switches.order, rounds and not reason):
            best, best_ms = self.incumbents.best, self.incumbents.best_ms
            is_limited = best is not None and request.objective == "makespan"
            horizon_ms = best_ms if is_limited else serial_ms(self._problem)  # no better schedule ends later
            model = Model(self._problem, request.objective, horizon_ms, replace(switches, order=order), down)
            name = f"equal {ORDERS[order]}" if order != "none" and not costs.are_equal else ORDERS[order]
            name += f", sizes rounded {'down' if down else 'up'} to MiB" if rounds else ""
            if model.possible:
                solver = self._solve(model, name, solver, clock)
            else:
                nothing = f"nothing shorter than {best_ms:.6g} ms" if best else "no schedule"
                self.report(f"{nothing} is possible, without a search, with {name}")
            proven = reaches(self.incumbents.best_ms, trivial_bound(request.problem, request.objective))
            if proven or model.is_bound or clock.over:
                break
        if reason:
            self.report(f"its optimum is no bound, as the model has {reason}; method auto has no such limits")

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

    def _solve(self, model: Model, name: str, solver: str, clock: Clock) -> str:
        """Solves a model and reports on the way. Returns the backend that did it."""
        latest = Outcome("", "not ended")

        def report(outcome: Outcome) -> None:
            """Such as `HiGHS: optimal after 0.8 s and 17 nodes, its own best 21 ms, bound 21 ms; 165 ...`."""
            nonlocal latest
            latest, ongoing, own = outcome, outcome.status == "not ended", self._own_ms
            after = "" if ongoing else f" after {outcome.seconds:.1f} s"
            nodes = "" if outcome.nodes is None else f" and {outcome.nodes} nodes"
            best = "no schedule of its own" if own == math.inf else f"its own best {own:.6g} ms"
            bound = "no bound" if outcome.bound is None else f"bound {outcome.bound / model.scale:.6g} ms"
            progress = f"{outcome.solver}: {outcome.status}{after}{nodes}, {best}, {bound}"
            self.report(f"{progress}; {model.rows.size}, with {name}", ongoing)

        def on_solution(x: Floats) -> None:
            schedule = prune(lift(self._problem, model.starts(x), METHOD))
            wrong = self.incumbents.offer(schedule, is_own=True)
            if not wrong and not check(self._problem, schedule):  # one that is no better was not checked
                self._own_ms = min(self._own_ms, length_ms(schedule, self._request.objective))
            if wrong and not model.units.down:  # rounded down, what does not fit may seem to fit
                self._note(f"a schedule of {METHOD} was rejected: {wrong}")
            report(latest)

        def on_bound(value: float) -> None:
            if model.is_bound:  # a length is a sum of the problem's times, so a multiple of their common step
                steps = math.ceil(Fraction(value / model.scale) / self._step_ms)
                self.incumbents.raise_bound(float(steps * self._step_ms), METHOD)
            report(replace(latest, bound=value))

        task = Task(
            rows=model.rows,
            objective=model.variables.length,
            start=assignment(model.variables, self.incumbents.best) if self.incumbents.best else {},
            clock=clock,
            threads=self._request.threads,
            seed=self._request.seed,
            on_solution=on_solution,
            on_bound=on_bound,
            on_start=lambda solver: report(Outcome(solver, "not ended")),
        )
        solver, outcome = minimize(solver, task, self._note)
        report(outcome)
        return solver

    def report(self, text: str, ongoing: bool = False) -> None:
        """A note on how a search ended, or how far it is, for whoever asked for this engine."""
        self._emit(Note(text=f"{METHOD}: {text}", method=METHOD, ongoing=ongoing))

    def _note(self, text: str) -> None:
        """A note, once."""
        if text not in self._notes:
            self._notes.add(text)
            self._emit(Note(text=text))


class Interval(NamedTuple):
    """When an op runs, in ms."""

    start: float
    end: float


NOT_MADE = Interval(math.inf, math.inf)


def assignment(v: Variables, schedule: Schedule) -> dict[int, float]:
    """The values of the binaries, by variable, in a schedule. They contradict each other if the model cannot express
    the schedule; the solver then drops them."""
    truths = _Reading(v, schedule).truths()
    return {literal.var: float(literal.positive == truth) for literal, truth in truths if literal.var >= 0}


class _Reading:
    """A schedule as the model's variables see it: when each compute op runs, and when activations move."""

    def __init__(self, v: Variables, schedule: Schedule) -> None:
        self._v, timeline = v, schedule.timeline
        rows = zip(timeline.table.tolist(), timeline.start.tolist(), timeline.end.tolist(), strict=True)
        self._interval = {
            Op(Kind(row[KIND]), row[STAGE], row[MICROBATCH], row[PART]): Interval(start, end)
            for row, start, end in rows
        }
        self._compute = self._compute_intervals()
        # By activation when the whole of it moves; None where the solver decides.
        self._offload = {a: self._transfer_interval(Kind.O, a) for a in v.activations}
        self._reload = {a: self._transfer_interval(Kind.R, a) for a in v.activations}
        self._offloaded = {a for a in v.activations if self._offload[a]}
        self._place_transfers_of_what_stays()

    def truths(self) -> Iterator[tuple[Literal, bool]]:
        """Each literal, and whether it holds; of the orders of transfers those that the schedule fixes."""
        v, compute = self._v, [self._compute[op] for op in self._v.paths.ops]
        offload, reload = (
            {a: each if each and a in self._offloaded else NOT_MADE for a, each in moved.items()}
            for moved in (self._offload, self._reload)
        )
        for (x, y), is_before in v.op_before.items():
            yield is_before, compute[x] < compute[y]
        for a, is_offloaded in v.offloaded.items():
            yield is_offloaded, a in self._offloaded
        for orders, moved in ((v.offload_before, self._offload), (v.reload_before, self._reload)):
            for (a, b), literal in orders.items():
                first, second = moved[a], moved[b]
                if a < b and first is not None and second is not None:
                    yield literal, first <= second
                    yield orders[b, a], first > second
        for (a, b), is_before in v.offload_before_reload.items():
            first, second = self._offload[a], self._reload[b]
            if first is not None and second is not None:
                yield is_before, first <= second
        for (a, y), drops in v.drop_before.items():
            yield drops, offload[a].end <= compute[y].start
        for (a, y), returns in v.return_before.items():
            yield returns, reload[a].start < compute[y].end
        for (c, b), is_away in v.away_at_reload.items():
            # It allocates where its copy starts or, if that is during a compute op, before this op.
            begin = reload[b].start
            during = (compute[y].start for a, y in v.return_before if a == b and compute[y].end > begin)
            dropped = offload[c].end <= min([begin, *during])
            yield is_away, b in self._offloaded and dropped and begin < reload[c].start < math.inf

    def _transfer_interval(self, kind: Kind, a: Activation) -> Interval | None:
        """From the first part's start to the last one's end; None unless all parts move, as the model moves whole
        activations."""
        parts = [Op(kind, *a, part) for part in range(self._v.problem.stages[a[0]].offload_parts)]
        if not all(part in self._interval for part in parts):
            return None
        intervals = [self._interval[part] for part in parts]
        return Interval(min(part.start for part in intervals), max(part.end for part in intervals))

    def _place_transfers_of_what_stays(self) -> None:
        """The transfer of what stays takes no time and lies between two others, as early as those before it allow."""
        v, link = self._v, self._v.costs.link[self._v.costs.device]
        half_duplex = v.problem.transfer_mode == "half_duplex"
        for a in sorted(v.activations):
            if a in self._offloaded or v.keeps_place(a):
                continue
            moment = self._compute[Op(Kind.F, *a)].end
            for moved, other_way in ((self._offload, self._reload), (self._reload, self._offload)):
                before = (moved[b] for b in v.activations if v.keep_order(b, a))
                moment = max([moment, *(interval.end for interval in before if interval)])
                on_stream = [*moved.items(), *(other_way.items() if half_duplex else ())]
                for start, end in sorted(x for b, x in on_stream if x and link[b[0]] == link[a[0]]):
                    if start < moment < end:
                        moment = end
                moved[a] = Interval(moment, moment)

    def _compute_intervals(self) -> dict[Op, Interval]:
        """Start and end of every F, B and W. A BW is a B followed by its W; Ws are numbered as their Bs, with a fixed
        order everything is."""
        v, intervals = self._v, dict[Op, Interval]()
        for op in compute_ops(v.problem):
            fused = self._interval.get(Op(Kind.BW, op.stage, op.microbatch))
            if fused is None or op.kind == Kind.F:
                intervals[op] = self._interval[op]
            else:
                middle = fused.start + float(v.costs.ms[Kind.B, op.stage, op.microbatch])
                intervals[op] = Interval(fused.start, middle) if op.kind == Kind.B else Interval(middle, fused.end)
        for route, batches in equal_microbatches(v.problem):
            for s in route:
                F, B, W = ([Op(kind, s, j) for j in batches] for kind in (Kind.F, Kind.B, Kind.W))
                if v.order != "stages":
                    W = [w for _, w in sorted(zip((intervals[b] for b in B), W, strict=True))]
                for ops in (F, B, W) if v.order == "stages" else (W,):
                    intervals |= dict(zip(ops, sorted(intervals[op] for op in ops), strict=True))
        return intervals
