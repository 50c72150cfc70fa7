"""List scheduling: a clock runs, and each device that falls idle starts the best op that its memory admits.

Every heuristic is a `Policy` for it. Memory is counted by the rule of the certificate (`optpipe.evaluate.effects`), so
what comes out fits; `Reserve` sees to it that what is in flight can always be finished, so it never gets stuck.
`transfers` schedules the links.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from time import monotonic

from optpipe.evaluate.objective import NEVER
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe_solver.bounds.least_memory import Relief
from optpipe_solver.heuristics.policy import Policy
from optpipe_solver.heuristics.state import ARRIVAL, LOOK, SchedulingState
from optpipe_solver.heuristics.transfers import Transfers

SAME_MOMENT_MS = 1e-9  # sums of the same durations in another order differ by less
F, B, W, BW, C, O, R = Kind.F, Kind.B, Kind.W, Kind.BW, Kind.C, Kind.O, Kind.R


class ListScheduler(SchedulingState):
    """Schedules of one problem, one after the other; `rows` and `starts` are the last one."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._splits = [not takes for takes in self.takes[W]]  # or W might wait for memory forever
        self.transfers = Transfers(self)

    def begin(self, policy: Policy) -> None:
        super().begin(policy)
        self.transfers.begin()
        self.weights: list[deque[tuple[int, int]]] = [deque() for _ in self.problem.devices]
        self.splits = [policy.split and can for can in self._splits]
        self.in_flight = [0] * len(self.problem.stages)
        self.returning = [False] * len(self.problem.stages)  # whether a stage has begun with its backwards
        self.admitted = 0

    def run(self, policy: Policy, deadline: float = NEVER) -> bool:
        """Run to the end of the iteration. False if the deadline, a moment of `time.monotonic`, passes before."""
        self.begin(policy)
        for j, route in enumerate(self.route):
            heapq.heappush(self.forwards[self.device[route[0]]].setdefault(route[0], []), (self.rank[j], j))
        touched = set(range(len(self.held)))
        while monotonic() < deadline:
            for d in touched:
                self.transfers.start_on(d)
            for d in touched:
                if not self.busy[d]:
                    self._compute(d)
            if not self.events:
                return True
            touched = set()
            self.now = self.events[0][0]
            while self.events and self.events[0][0] <= self.now + SAME_MOMENT_MS:
                moment, _, code, stage, j, part = heapq.heappop(self.events)
                self.now = max(self.now, moment)
                under_way = len(self.reserve.active)
                touched.add(self._handle(code, stage, j, part))
                if len(self.reserve.active) < under_way:  # the next in line may start elsewhere what it could not
                    touched.update(range(len(self.held)))
        return False

    def _handle(self, code: int, stage: int, j: int, part: int) -> int:
        """Handle an event; return its device."""
        d = self.device[stage]
        if code >= LOOK:
            self.transfers.looked(d)
        elif code == ARRIVAL + F:
            heapq.heappush(self.forwards[d].setdefault(stage, []), (self.rank[j], j))
        elif code == ARRIVAL + B:
            insort(self.backwards[d], (self.rank[j], j, stage))
            heapq.heappop(self.coming[d])
        elif code in (O, R):
            self.transfers.ended(code, stage, j, part)
        else:
            self._compute_ended(code, stage, j)
        return d

    def _compute_ended(self, code: int, stage: int, j: int) -> None:
        d = self.device[stage]
        self.busy[d] = False
        frees = self.frees
        if code == F:
            relief = self.relief[stage, j]
            if relief.recompute:
                frees = self.recomputed_frees
            elif relief.parts:
                self.transfers.leave(stage, j, relief.parts)
        elif code == C:
            frees = self.recomputed_frees
        elif code in (B, BW):
            self.reserve.backward_done(stage, j)
            if code == B:
                self.weights[d].append((stage, j))
        self.held[d] -= frees[code][stage]
        self.transfers.drop(d)

    def _compute(self, d: int) -> None:
        """Start the best op on an idle device."""
        if self._fills(d) and self._start_forward(d):
            return
        if self._start_backward(d) or self._start_forward(d) or not self.weights[d]:
            return
        stage, j = self.weights[d][0]
        patience_ms = self.policy.patience * self.ms[W][stage]
        if not (self.coming[d] and self.coming[d][0] - self.now < patience_ms):
            self.weights[d].popleft()
            self._start(W, stage, j, 0)

    def _fits(self, d: int, more: int) -> bool:
        return self.held[d] + more <= self.memory[d]

    def _fills(self, d: int) -> bool:
        """Whether a stage's first backward, which has its gradient, is to wait for forwards."""
        most = self.policy.before
        return most is not None and any(
            not self.returning[s] and self.in_flight[s] < most[s] for _, _, s in self.backwards[d]
        )

    def _start(self, kind: Kind, stage: int, j: int, takes: int) -> None:
        d, k, last = self.device[stage], self.position[j][stage], len(self.route[j]) - 1
        self.record(kind, stage, j)
        self.held[d] += takes
        self.busy[d] = True
        end = self.now + self.ms[kind][stage]
        self.expect(end, kind, stage, j)
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
            self.expect(arrives, ARRIVAL + code, following, j)
            if code == B:
                heapq.heappush(self.coming[there], arrives)

    def _start_backward(self, d: int) -> bool:
        """Start the oldest backward whose activation is there; else the oldest recompute that one waits for."""
        for n, (_, j, stage) in enumerate(self.backwards[d]):
            if self.relief[stage, j].recompute or not self.transfers.is_resident(stage, j):
                continue
            kind = B if self.splits[stage] and self._fits(d, self.takes[B][stage]) else BW
            if not self._fits(d, self.takes[kind][stage]):
                continue
            del self.backwards[d][n]
            del self.relief[stage, j]
            self.transfers.forget(stage, j)
            self.in_flight[stage] -= 1
            self.returning[stage] = True
            self._start(kind, stage, j, self.takes[kind][stage])
            return True
        for _, j, stage in self.backwards[d]:
            takes = self.recomputed_takes[C][stage]
            if self.relief[stage, j].recompute and self._fits(d, takes) and self.reserve.regains(stage, j):
                self.relief[stage, j] = Relief()
                self._start(C, stage, j, takes)
                return True
        return False

    def _start_forward(self, d: int) -> bool:
        """Start the forward farthest along its route among those that limit and memory admit.

        The limit does not hold for the oldest micro-batch, nor has it to leave room for what comes back.
        """
        heads = [(j, stage) for stage, queue in self.forwards[d].items() if queue for _, j in queue[:1]]
        for j, stage in sorted(heads, key=lambda item: -self.position[item[0]][item[1]]):
            oldest = j == self.reserve.active[0] if self.reserve.active else True
            if not (oldest or self._within_limit(stage)):
                continue
            room = 0 if oldest else self.transfers.room(d)
            if not self._fits(d, self.takes[F][stage] + room) or not self._promise(stage, j):
                continue
            heapq.heappop(self.forwards[d][stage])
            if self.position[j][stage] == 0:
                self.rank[j] = self.admitted
                self.admitted += 1
            self.in_flight[stage] += 1
            self.forwards_left[d] -= 1
            self._start(F, stage, j, self.takes[F][stage])
            return True
        return False

    def _within_limit(self, stage: int) -> bool:
        most = self.policy.in_flight
        return most is None or self.in_flight[stage] < most[stage]

    def _promise(self, stage: int, j: int) -> bool:
        """Decide what becomes of an activation: what the policy prefers, or what all in flight can be finished with."""
        base = self.base[self.problem.costs.route[j]][stage]
        preferred = self.policy.relief(stage, j, self.problem.stages[stage].offload_parts)
        if base != Relief() or (preferred.recompute and not self.reserve.recomputes_freely(stage)):
            preferred = base
        for relief in dict.fromkeys((preferred, base)):
            if self.reserve.admits(stage, j, *self.reserve.settled(stage, relief)):
                self.relief[stage, j] = relief
                return True
        return False
