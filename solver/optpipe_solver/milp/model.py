"""OptPipe's mixed-integer linear program (Appendix C.1), in the paper's letters, for any solver.

Here are the compute ops and the objective, Eq. 2 to 8; `offload` adds memory and transfers, Eq. 9 to 19.

The paper fixes the order of the micro-batches "without affecting optimality". Without offload that is so: number the
k-th F, B and W of every stage k, and what they wait for still comes in time. With offload an activation's F, O, R and B
belong together, and a backward that overtakes another one can hide its reload. Nor is it so of the span: a device that
lets micro-batch 2 overtake micro-batch 1 starts later. Hence `Switches.order`: fixed in all stages is quick and good,
but its optimum is no lower bound where offload or the span matters.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import TYPE_CHECKING

import numpy as np

from optpipe.evaluate.objective import Objective
from optpipe.model.arrays import Floats
from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.milp.offload import Offload, Time
from optpipe_solver.milp.rows import FALSE, TRUE, Literal, Precedence, Rows
from optpipe_solver.milp.switches import Switches
from optpipe_solver.milp.triangles import Triangles
from optpipe_solver.milp.windows import Windows, passing

if TYPE_CHECKING:
    from optpipe_solver.milp.frame import Frame, Known

LARGEST = 1024.0  # the horizon in the model's unit of time, so that the solver's absolute tolerances fit every problem


def may_offload(problem: Problem) -> set[int]:
    """Stages whose activations may have to leave: they can, and their device cannot hold all that could be on it at
    once."""
    stays = np.maximum(problem.costs.activation, problem.costs.saved_for_weight)
    wanted = np.zeros(len(problem.devices))
    for route, batches in passing(problem).items():
        for s in route:
            wanted[problem.costs.device[s]] += len(batches) * stays[s]
    tight = wanted > problem.costs.activation_budget
    return {
        s
        for route in passing(problem)
        for s in route
        if problem.costs.can_offload[s] and tight[problem.costs.device[s]]
    }


def serial_ms(problem: Problem) -> float:
    """No schedule worth finding is longer: started as early as can be, on none does everything run one after the
    other."""
    ms = problem.costs.ms
    compute, moved = ms[[Kind.F, Kind.B, Kind.W]].sum(axis=0), ms[[Kind.O, Kind.R]].sum(axis=0) * problem.costs.parts
    whole = compute + moved + 2 * problem.p2p_ms
    return float(sum(whole[s] for j in range(problem.microbatches) for s in problem.route(j)))


class Model:
    """The program for one problem; solutions longer than `horizon_ms` are cut off. Build it, solve `rows`, read
    `starts(x)`.

    With a `frame`, only what lies in a window of an incumbent is open: what is before it is over at a known time, and
    what is after it keeps its order, so that it starts at C less its tail (the longest path from there to the end). The
    objective is then the makespan.
    """

    def __init__(
        self, problem: Problem, objective: Objective, horizon_ms: float, switches: Switches, frame: Frame | None = None
    ) -> None:
        self.problem, self.objective, self.order = problem, objective, switches.order
        self._one_per_pair = switches.one_per_pair
        self.scale = 2.0 ** np.floor(np.log2(LARGEST / horizon_ms))  # a power of two: times stay exact
        self.windows = windows = Windows(
            problem, horizon_ms * self.scale, self.scale, switches.order, switches.determined, frame
        )
        self.frame = frame
        self.rows = Rows(None if switches.tight else (horizon_ms + serial_ms(problem)) * self.scale)
        if not windows.possible:
            return
        ends = (windows.head + windows.time, windows.horizon - windows.tail + windows.time)
        self.E = [self.rows.variable(low, max(low, high)) for low, high in zip(*ends, strict=True)]
        self.C = self.rows.variable(frame.least_ms * self.scale if frame else 0.0, windows.horizon)
        self.zero = self.rows.variable(0.0, 0.0) if frame else -1
        self._order_literals()
        self._known_orders()
        self._exclusive_compute()
        self.triangles = Triangles(self.P, windows.device)
        if switches.triangles == "all":
            for clause in self.triangles.all():
                self.rows.clause(*clause)
        self.violated = self.triangles.violated if switches.triangles == "lazy" else None
        if objective == "makespan":
            self._makespan()
        else:
            self._span()
            self._at_once()
        if switches.workload:
            self._workload()
        self.offload = Offload(self, may_offload(problem), frame)

    @property
    def is_bound(self) -> bool:
        """Whether its optimum bounds every schedule of the problem, not only those that it can express (no recompute,
        no pairs, whole activations, B and W apart). B followed by W does all that BW does, earlier for the stage
        before, and needs no more memory unless `saved_for_weight_bytes` exceed `activation_bytes`."""
        problem, costs = self.problem, self.problem.costs
        expresses_all = problem.overlap_factor is None and problem.layers is None and not costs.can_recompute.any()
        expresses_all = (
            expresses_all and not (costs.parts > 1).any() and not (costs.saved_for_weight > costs.activation).any()
        )
        order_is_free = self.objective == "makespan" and not may_offload(
            problem
        )  # a device has a shorter span where it starts later
        return self.frame is None and expresses_all and (self.order != "stages" or order_is_free)

    def pair(self) -> tuple[Literal, Literal]:
        """Eq. 1: whether one precedes the other, and whether the other precedes the one: exactly one of both."""
        first = self.rows.literal()
        if self._one_per_pair:
            return first, ~first
        second = self.rows.literal()
        self.rows.clause(first, second)
        self.rows.clause(~first, ~second)
        return first, second

    def _order_literals(self) -> None:
        """P of Eq. 7, no variable where the order is known. As the k-th W of a stage can always be the W of its k-th B
        (what a W frees is alike), Ws follow the order of their Bs where an order is fixed at all."""
        windows = self.windows
        self.P: dict[tuple[int, int], Literal] = {}
        for x, y in combinations(range(len(windows.ops)), 2):
            if windows.device[x] != windows.device[y]:
                continue
            first, second = windows.ops[x], windows.ops[y]
            if windows.precedes(x, y):
                pair = TRUE, FALSE
            elif windows.precedes(y, x):
                pair = FALSE, TRUE
            elif first.kind == second.kind == Kind.W and first.stage == second.stage and self.order != "none":
                b, c = windows.number[first._replace(kind=Kind.B)], windows.number[second._replace(kind=Kind.B)]
                pair = self.P[b, c], self.P[c, b]
            else:
                pair = self.pair()
            self.P[x, y], self.P[y, x] = pair

    def _known_orders(self) -> None:
        """Eq. 5, 6 and 8, and the order of Eq. 1: `windows` has one function for each."""
        for x, y, delay in self.windows.arcs:
            self.rows.precede(Precedence(self.E[y], self.E[x], self.windows.time[y] + delay))

    def _exclusive_compute(self) -> None:
        """Eq. 7: a device computes one op at a time. As printed it leaves out pairs of one kind and pairs of one
        micro-batch (`j' ≠ j, c' ≠ c`); any two ops of a device exclude each other."""
        for (x, y), P in self.P.items():
            if P != TRUE:
                self.rows.precede(Precedence(self.E[y], self.E[x], self.windows.time[y], when=(P,)))

    def _makespan(self) -> None:
        """Eq. 4. The first forward of all starts at 0, so its start needs no term."""
        windows = self.windows
        lasts = ~(windows.lag > -np.inf).any(axis=1)
        for x in np.flatnonzero(lasts | (windows.rest > windows.time)).tolist():
            self.rows.precede(Precedence(self.C, self.E[x], float(windows.rest[x] - windows.time[x])))

    def _span(self) -> None:
        """Eq. 3: device by device, from the first start to the last end. As printed, the first op is F of micro-batch 1
        and the last one W of micro-batch m; here any op counts that may be first, and any that may be last."""
        windows = self.windows
        follows, same = windows.lag > -np.inf, windows.device[:, None] == windows.device
        firsts, lasts = ~(follows & same).any(axis=0), ~(follows & same).any(axis=1)
        for x, y in product(np.flatnonzero(firsts).tolist(), np.flatnonzero(lasts).tolist()):
            if windows.device[x] == windows.device[y]:
                self.rows.add([(1.0, self.C), (1.0, self.E[x]), (-1.0, self.E[y])], (), windows.time[x])

    def _at_once(self) -> None:
        """Eq. 3 must not gain by starting a device late: what it computes first, a forward of the first stage that it
        has on a route, starts in any simulated schedule as soon as it has arrived. The paper has no such row."""
        windows, arrivals = self.windows, self._first_arrivals()
        for x, before in arrivals.items():
            others = [y for y in arrivals if y != x and windows.device[y] == windows.device[x]]
            p2p = self.problem.p2p_ms * self.scale if before is not None else 0.0
            gap = float(windows.time[x]) + p2p
            arrives = [(1.0, self.E[before])] if before is not None else []
            late = max(0.0, self.rows.upper[self.E[x]] - gap)
            self.rows.add([(-1.0, self.E[x]), *arrives], [(late, self.P[y, x]) for y in others], -gap)

    def _first_arrivals(self) -> dict[int, int | None]:
        """The forwards that a device may compute first, each with the forward that it waits for."""
        number, found = self.windows.number, dict[int, int | None]()
        for route, batches in passing(self.problem).items():
            devices = [self.problem.stages[s].device for s in route]
            for k, s in enumerate(route):
                if devices[k] not in devices[:k]:
                    found |= {
                        number[Op(Kind.F, s, j)]: number[Op(Kind.F, route[k - 1], j)] if k else None for j in batches
                    }
        return found

    def _workload(self) -> None:
        """Valid cuts: an op waits for all the work of its device that precedes it, and all that follows it comes before
        the end; nothing beats the trivial bound."""
        windows, add = self.windows, self.rows.add
        trivial = trivial_bound(self.problem, self.objective) * self.scale * (1 - 1e-12)
        self.rows.lower[self.C] = max(self.rows.lower[self.C], trivial)
        for y, E in enumerate(self.E):
            own = [x for x in np.flatnonzero(windows.device == windows.device[y]).tolist() if x != y]
            soonest = float(windows.head[windows.device == windows.device[y]].min())
            add([(1.0, E)], [(-float(windows.time[x]), self.P[x, y]) for x in own], soonest + float(windows.time[y]))
            if self.objective == "makespan":
                rest = float((windows.tail - windows.time)[windows.device == windows.device[y]].min())
                add([(1.0, self.C), (-1.0, E)], [(-float(windows.time[x]), self.P[y, x]) for x in own], rest)

    def time(self, known: Known) -> Time:
        """A moment outside the window: known, or at C less a known time."""
        return (self.C, -known.ms * self.scale) if known.after else (self.zero, known.ms * self.scale)

    def starts(self, x: Floats) -> dict[Op, float]:
        """The start in ms of every op, in the schedule that the binaries of a solution describe, exact and as early as
        can be."""
        times, costs, windows = self.rows.earliest(x) / self.scale, self.problem.costs, self.windows
        starts = {op: float(times[E] - costs.ms[op.kind, op.stage]) for op, E in zip(windows.ops, self.E, strict=True)}
        for kind, begin in ((Kind.O, self.offload.O), (Kind.R, self.offload.R)):
            for a, (var, offset) in begin.items():
                if self.rows.holds(self.offload.W[a], x):
                    first = float(times[var] + offset / self.scale)
                    starts |= {
                        Op(kind, *a, part): first + part * float(costs.ms[kind, a[0]])
                        for part in range(costs.parts[a[0]])
                    }
        return starts | self.frame.starts(float(times[self.C]), set(self.offload.activations)) if self.frame else starts
