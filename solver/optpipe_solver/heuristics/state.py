"""`SchedulingState`: what list scheduling knows at a moment; its rules are in `list_scheduling` and `transfers`."""

from __future__ import annotations

import heapq
from itertools import accumulate, pairwise

import numpy as np

from optpipe.evaluate.effects import Effects
from optpipe.lift import grain
from optpipe.model.arrays import OFF_ROUTE
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe_solver.bounds.least_memory import Relief, reliefs
from optpipe_solver.heuristics.policy import Policy
from optpipe_solver.heuristics.reserve import Reserve

# Codes of events. The end of an op is its kind; the arrival of its input is its kind and ARRIVAL.
ARRIVAL = 100
LOOK = 200  # a link looks for something to do

Event = tuple[float, int, int, int, int, int]  # moment (ms), rows so far, code, stage, micro-batch, part


class SchedulingState:
    """The clock, its events, the ops that have started, and what each device holds and waits for.

    What belongs to the problem is computed once; each schedule of it begins with `begin`.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        costs, m = problem.costs, problem.microbatches
        instant = 10 * grain(np.array([costs.ms.sum() * m]))  # what takes no time takes this, to show what came first
        self.ms: list[list[float]] = np.maximum(costs.ms, instant).tolist()
        self.device: list[int] = costs.device.tolist()
        effects = Effects(problem)
        self.takes: list[list[int]] = effects.takes.tolist()
        self.frees: list[list[int]] = effects.frees.tolist()
        self.recomputed_takes, self.recomputed_frees = (bytes.tolist() for bytes in effects.recomputed)
        self.parts = effects.parts

        self.route = [problem.route(j) for j in range(m)]
        self.position = [{s: k for k, s in enumerate(route)} for route in self.route]
        ahead = {route: self._ahead(route) for route in set(self.route)}
        back = {route: dict(zip(route, ahead[route][-2::-1], strict=False)) for route in ahead}  # the last is the end
        self.ahead, self.back = [ahead[route] for route in self.route], [back[route] for route in self.route]

        self.base = [reliefs(problem, route) for route in problem.all_routes]
        self.memory = [d.activation_budget_bytes for d in problem.devices]
        self.reserve = Reserve(problem, self.base)
        passing = (costs.before[costs.route] != OFF_ROUTE).sum(axis=0)  # (S,) micro-batches
        left = np.bincount(costs.device, weights=passing, minlength=len(problem.devices))
        self._forwards: list[int] = left.astype(int).tolist()

    def begin(self, policy: Policy) -> None:
        """Go back to the time before the first op."""
        self.policy = policy
        m, devices = self.problem.microbatches, len(self.problem.devices)
        self.reserve.begin()
        self.held = [0] * devices  # bytes, those of the running op included
        self.busy = [False] * devices
        self.forwards: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(devices)]  # by stage: rank, j
        self.backwards: list[list[tuple[int, int, int]]] = [[] for _ in range(devices)]  # gradient is there: rank, j, s
        self.coming: list[list[float]] = [[] for _ in range(devices)]  # when the next gradients arrive
        self.rank = [m + j for j in range(m)]  # micro-batches in the order in which they were admitted
        self.forwards_left = self._forwards.copy()
        self.begun = [0.0] * m  # when a micro-batch would have begun, had it run at full speed to where it is
        self.relief: dict[tuple[int, int], Relief] = {}  # of activations between forward and backward

        self.events: list[Event] = []
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.starts: list[float] = []
        self.now = 0.0

    def _ahead(self, route: tuple[int, ...]) -> list[float]:
        """At full speed, how long after a micro-batch's begin each forward starts, and then each backward, in order."""
        hop = [self.problem.p2p_ms if self.device[a] != self.device[b] else 0.0 for a, b in pairwise(route)]
        steps = [self.ms[Kind.F][s] + h for s, h in zip(route, [*hop, 0.0], strict=True)]
        steps += [self.ms[Kind.B][s] + h for s, h in zip(reversed(route), [*reversed(hop), 0.0], strict=True)]
        return list(accumulate(steps, initial=0.0))

    def expect(self, moment: float, code: int, stage: int, j: int, part: int = 0) -> None:
        """Add an event."""
        heapq.heappush(self.events, (moment, len(self.rows), code, stage, j, part))

    def record(self, kind: Kind, stage: int, j: int, part: int = 0) -> None:
        """Note that an op starts now."""
        self.rows.append((kind, stage, j, part, 0))
        self.starts.append(self.now)

    def backward_expected(self, stage: int, j: int) -> float:
        """The moment at which the backward will be able to start if all goes at full speed from here."""
        return self.begun[j] + self.back[j][stage]
