"""List scheduling: a clock runs, and each device that falls idle starts the best op that its memory admits.

Every heuristic is a `Policy` for it. Memory is counted by the program's rule (`optpipe.evaluate.memory`), so what comes
out passes `certify`, and `Reserve` sees to it that what is in flight can always be finished, so it never gets stuck.
`links` holds the transfers' side.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from itertools import accumulate, pairwise
from time import monotonic

import numpy as np

from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe_solver.bounds.least_memory import Relief, reliefs
from optpipe_solver.heuristics.policy import Policy
from optpipe_solver.heuristics.reserve import Reserve, settled
from optpipe_solver.heuristics.transfers import LOOK, Links
from optpipe_solver.lift import grain

SAME_MOMENT = 1e-9  # ms; sums of the same durations in another order differ by less
F, B, W, BW, C, O, R = Kind.F, Kind.B, Kind.W, Kind.BW, Kind.C, Kind.O, Kind.R
ARRIVAL = 100  # code of an event: an op's end (its kind), the arrival of its input (its kind and this), or `LOOK`


class Listing:
    """One run of the clock; `rows` and `starts` are its result."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        self.problem, self.policy = problem, policy
        costs, m, devices = problem.costs, problem.microbatches, len(problem.devices)
        instant = 10 * grain(
            np.array([costs.ms.sum() * m])
        )  # what takes no time takes this here, so that `lift` sees which came first
        self.ms: list[list[float]] = np.maximum(costs.ms, instant).tolist()
        self.device: list[int] = costs.device.tolist()
        self.activation: list[int] = costs.activation.tolist()
        self.kept: list[int] = costs.saved_for_weight.tolist()
        self.route = [problem.route(j) for j in range(m)]
        self.position = [{s: k for k, s in enumerate(route)} for route in self.route]
        ahead = {route: self._ahead(route) for route in set(self.route)}
        back = {route: dict(zip(route, ahead[route][-2::-1], strict=False)) for route in ahead}  # the last is the end
        self.ahead, self.back = [ahead[route] for route in self.route], [back[route] for route in self.route]
        self.base = [reliefs(problem, route) for route in problem.all_routes]
        self.memory = [d.activation_budget_bytes for d in problem.devices]
        self.reserve = Reserve(problem, self.memory, costs.host_memory.tolist(), self.base)
        self.held = [0] * devices  # bytes by the program's rule, the running op's included
        self.busy = [False] * devices
        self.forwards: list[dict[int, list[tuple[int, int]]]] = [
            {} for _ in range(devices)
        ]  # by stage: turn and micro-batch
        self.backwards: list[list[tuple[int, int, int]]] = [
            [] for _ in range(devices)
        ]  # gradients that have arrived: turn, micro-batch, stage
        self.weights: list[deque[tuple[int, int]]] = [deque() for _ in range(devices)]
        self.coming: list[list[float]] = [[] for _ in range(devices)]  # when the next gradients arrive
        self.in_flight = [0] * len(problem.stages)
        self.returning = [False] * len(problem.stages)  # whether a stage has begun with its backwards
        self.turn = [m + j for j in range(m)]
        self.admitted = 0
        passing = (costs.before[costs.route] != -2).sum(axis=0)  # (S,) micro-batches
        self.forwards_left: list[int] = (
            np.bincount(costs.device, weights=passing, minlength=devices).astype(int).tolist()
        )
        self.begun = [0.0] * m  # when a micro-batch would have begun, had it run at full speed to where it is
        self.relief: dict[tuple[int, int], Relief] = {}  # of activations between forward and backward
        self.links = Links(self)
        self.events: list[tuple[float, int, int, int, int, int]] = []
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.starts: list[float] = []
        self.now = 0.0

    def _ahead(self, route: tuple[int, ...]) -> list[float]:
        """At full speed, how long after a micro-batch's begin each forward starts, and then each backward, in order."""
        hop = [self.problem.p2p_ms if self.device[a] != self.device[b] else 0.0 for a, b in pairwise(route)]
        steps = [self.ms[F][s] + h for s, h in zip(route, [*hop, 0.0], strict=True)]
        steps += [self.ms[B][s] + h for s, h in zip(reversed(route), [*reversed(hop), 0.0], strict=True)]
        return list(accumulate(steps, initial=0.0))

    def run(self, deadline: float = float("inf")) -> bool:
        """Whether it came to the end before the deadline, a moment of `time.monotonic`."""
        for j, route in enumerate(self.route):
            heapq.heappush(self.forwards[self.device[route[0]]].setdefault(route[0], []), (self.turn[j], j))
        touched = set(range(len(self.held)))
        while monotonic() < deadline:
            for d in touched:
                self.links.use(d)
            for d in touched:
                self._compute(d)
            if not self.events:
                return True
            touched = set()
            self.now = self.events[0][0]
            while self.events and self.events[0][0] <= self.now + SAME_MOMENT:
                time, _, code, stage, j, part = heapq.heappop(self.events)
                self.now = max(self.now, time)
                under_way = len(self.reserve.active)
                touched.add(self._happen(code, stage, j, part))
                if (
                    len(self.reserve.active) < under_way
                ):  # the next in line may do elsewhere what it could not do before
                    touched.update(range(len(self.held)))
        return False

    def at(self, time: float, code: int, stage: int, j: int, part: int = 0) -> None:
        """Something will happen."""
        heapq.heappush(self.events, (time, len(self.rows), code, stage, j, part))

    def record(self, kind: Kind, stage: int, j: int, part: int = 0) -> None:
        """An op starts now."""
        self.rows.append((kind, stage, j, part, 0))
        self.starts.append(self.now)

    def expected(self, stage: int, j: int) -> float:
        """When the backward will be able to start, if all goes at full speed from here."""
        return self.begun[j] + self.back[j][stage]

    def _happen(self, code: int, stage: int, j: int, part: int) -> int:
        d = self.device[stage]
        if code >= LOOK:
            self.links.looked(d)
        elif code == ARRIVAL + F:
            heapq.heappush(self.forwards[d].setdefault(stage, []), (self.turn[j], j))
        elif code == ARRIVAL + B:
            insort(self.backwards[d], (self.turn[j], j, stage))
            heapq.heappop(self.coming[d])
        elif code in (O, R):
            self.links.ended(code, stage, j, part)
        else:
            self._ended(code, stage, j)
        return d

    def _ended(self, code: int, stage: int, j: int) -> None:
        d = self.device[stage]
        self.busy[d] = False
        if code == F:
            relief = self.relief[stage, j]
            if relief.recompute:
                self.held[d] -= self.activation[stage] - settled(self.problem, stage, relief)[0]
            elif relief.parts:
                self.links.leave(stage, j, relief.parts)
        elif code == W:
            self.held[d] -= self.kept[stage]
        elif code in (B, BW):
            self.held[d] -= max(0, self.activation[stage] - self.kept[stage]) if code == B else self.activation[stage]
            self.reserve.backward_done(stage, j)
            if code == B:
                self.weights[d].append((stage, j))
        self.links.drop(d)

    def _compute(self, d: int) -> None:
        """Starts the best op, if the device is idle."""
        if self.busy[d]:
            return
        if self._fills(d) and self._start_forward(d):
            return
        if self._start_backward(d) or self._start_forward(d) or not self.weights[d]:
            return
        stage, j = self.weights[d][0]
        patience = self.policy.patience * self.ms[W][stage]
        if not (self.coming[d] and self.coming[d][0] - self.now < patience):
            self.weights[d].popleft()
            self._start(W, stage, j, 0)

    def _fills(self, d: int) -> bool:
        """Whether a stage's first backward, which has its gradient, is to wait for forwards."""
        most = self.policy.before
        return most is not None and any(
            not self.returning[s] and self.in_flight[s] < most[s] for _, _, s in self.backwards[d]
        )

    def _start(self, kind: Kind, stage: int, j: int, taken: int) -> None:
        d, k, last = self.device[stage], self.position[j][stage], len(self.route[j]) - 1
        self.record(kind, stage, j)
        self.held[d] += taken
        self.busy[d] = True
        end = self.now + self.ms[kind][stage]
        self.at(end, kind, stage, j)
        if kind == F:
            self.begun[j] = max(self.begun[j], self.now - self.ahead[j][k])
            following, code = (self.route[j][k + 1], F) if k < last else (stage, B)
        elif kind in (B, BW):
            self.begun[j] = max(self.begun[j], self.now - self.ahead[j][2 * last + 1 - k])
            following, code = (self.route[j][k - 1], B) if k > 0 else (-1, B)
        else:
            return
        if following >= 0:
            there = self.device[following]
            arrives = end + (self.problem.p2p_ms if there != d else 0.0)
            self.at(arrives, ARRIVAL + code, following, j)
            if code == B:
                heapq.heappush(self.coming[there], arrives)

    def _start_backward(self, d: int) -> bool:
        """The oldest backward whose activation is there; else the oldest recompute that one waits for."""
        for n, (_, j, stage) in enumerate(self.backwards[d]):
            if self.relief[stage, j].recompute or not self.links.resident(stage, j):
                continue
            grows = max(0, self.kept[stage] - self.activation[stage])
            kind = B if self.policy.split and self.held[d] + grows <= self.memory[d] else BW
            del self.backwards[d][n]
            del self.relief[stage, j]
            self.links.forget(stage, j)
            self.in_flight[stage] -= 1
            self.returning[stage] = True
            self._start(kind, stage, j, grows if kind == B else 0)
            return True
        for _, j, stage in self.backwards[d]:
            regained = self.activation[stage] - settled(self.problem, stage, self.relief[stage, j])[0]
            if not self.relief[stage, j].recompute or self.held[d] + regained > self.memory[d]:
                continue
            if self.reserve.regains(stage, j):
                self.relief[stage, j] = Relief()
                self._start(C, stage, j, regained)
                return True
        return False

    def _start_forward(self, d: int) -> bool:
        """Of the forwards that limit and memory admit the one farthest along its route; the oldest micro-batch knows
        memory only."""
        heads = [(j, stage) for stage, queue in self.forwards[d].items() if queue for _, j in queue[:1]]
        for j, stage in sorted(heads, key=lambda item: -self.position[item[0]][item[1]]):
            oldest = j == self.reserve.active[0] if self.reserve.active else True
            if not (oldest or self._within_limits(stage)):
                continue
            room = 0 if oldest else self.links.room(d)
            if self.held[d] + self.activation[stage] + room > self.memory[d] or not self._promise(stage, j):
                continue
            heapq.heappop(self.forwards[d][stage])
            if self.position[j][stage] == 0:
                self.turn[j] = self.admitted
                self.admitted += 1
            self.in_flight[stage] += 1
            self.forwards_left[d] -= 1
            self._start(F, stage, j, self.activation[stage])
            return True
        return False

    def _within_limits(self, stage: int) -> bool:
        most = self.policy.in_flight
        return most is None or self.in_flight[stage] < most[stage]

    def _promise(self, stage: int, j: int) -> bool:
        """Settles what becomes of an activation, so that all in flight can still be finished: what the policy wishes,
        or the least."""
        base = self.base[self.problem.costs.route[j]][stage]
        wish = self.policy.wish(stage, j, self.problem.stages[stage].offload_parts)
        for relief in dict.fromkeys((base if base != Relief() else wish, base)):
            if self.reserve.admits(stage, j, *settled(self.problem, stage, relief)):
                self.relief[stage, j] = relief
                return True
        return False
