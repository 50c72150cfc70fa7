"""List scheduling: a clock runs, and each device that falls idle starts the best op that its memory admits.

Memory is counted by the rule of the certificate (`optpipe.evaluate.effects`), so what comes out fits; `Reserve` sees to
it that what is in flight can always be finished, so it never gets stuck, on any number of routes. It needs no compiled
code, so its schedules are there first. `transfers` schedules the links.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from time import monotonic

import numpy as np

from optpipe.evaluate.objective import NEVER
from optpipe.lift import lift_table
from optpipe.model.costs import FORWARDS, GRADIENTS
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_solver.heuristics.policy import Policy
from optpipe_solver.heuristics.state import ARRIVAL, LOOK, STAYS, SchedulingState
from optpipe_solver.heuristics.transfers import Transfers

SAME_MOMENT_MS = 1e-9  # sums of the same durations in another order differ by less
F, B, W, BW, C, O, R = Kind.F, Kind.B, Kind.W, Kind.BW, Kind.C, Kind.O, Kind.R


class ListScheduler(SchedulingState):
    """Schedules of one problem, one after the other."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._can_split = [not any(takes) for takes in self.takes[W]]  # or W might wait for memory forever
        self.transfers = Transfers(self)

    def schedule(self, policy: Policy, method: str, deadline: float = NEVER) -> Schedule | None:
        """Return the policy's schedule, which fits if any does; None if a moment of `time.monotonic` passes before."""
        self.begin(policy)
        if not self._run(deadline):
            return None
        table = np.array(self.rows, dtype=np.int32).reshape(-1, 5)
        return lift_table(self.problem, table, np.array(self.starts), method)

    def begin(self, policy: Policy) -> None:
        super().begin(policy)
        self.transfers.begin()
        self.weights: list[deque[tuple[int, int]]] = [deque() for _ in self.problem.devices]
        self.in_flight = [0] * len(self.problem.stages)
        self.admitted = 0

    def _run(self, deadline: float) -> bool:
        """Run to the end of the iteration. False if the deadline passes before."""
        for j, route in enumerate(self.route):
            heapq.heappush(self.forwards[self.device[route[0]]].setdefault(route[0], []), (self.rank[j], j))
        all_devices = range(len(self.held))
        touched = set(all_devices)
        while monotonic() < deadline:
            for d in touched:
                self.transfers.start_on(d)
            for d in touched:
                if not self.busy[d]:
                    self._start_best_op(d)
            if not self.events:
                return True
            touched = set()
            self.now = self.events[0].ms
            while self.events and self.events[0].ms <= self.now + SAME_MOMENT_MS:
                event = heapq.heappop(self.events)
                self.now = max(self.now, event.ms)
                in_flight = len(self.reserve.in_flight)
                touched.add(self._handle(event.code, event.stage, event.microbatch, event.part))
                if len(self.reserve.in_flight) < in_flight:  # others may start elsewhere what they could not before
                    touched.update(all_devices)
        return False

    def _handle(self, code: int, stage: int, j: int, part: int) -> int:
        """Handle an event; return its device."""
        d = self.device[stage]
        if code == LOOK:
            self.transfers.note_look(d)
        elif code == ARRIVAL + F:
            heapq.heappush(self.forwards[d].setdefault(stage, []), (self.rank[j], j))
        elif code == ARRIVAL + B:
            insort(self.backwards[d], (self.rank[j], j, stage))
            heapq.heappop(self.gradient_arrivals[d])
        elif code in (O, R):
            self.transfers.end(code, stage, j, part)
        else:
            self._end_compute(code, stage, j)
        return d

    def _end_compute(self, code: int, stage: int, j: int) -> None:
        d = self.device[stage]
        self.busy[d] = False
        frees = self.frees
        if code == F:
            relief = self.relief[stage, j]
            if relief.is_recomputed:
                frees = self.level_frees[relief.level]
            if relief.parts:
                self.transfers.queue_offload(stage, j, relief.parts)
        elif code == C:
            self.relief[stage, j] = STAYS
        elif code in (B, BW):
            self.reserve.end_backward(stage, j)
            if code == B:
                self.weights[d].append((stage, j))
        self.held[d] -= frees[code][stage][self.alike[j]]
        self.transfers.drop(d)

    def _start_best_op(self, d: int) -> None:
        """Start a backward on an idle device, else a forward, else a weight gradient unless a backward comes soon."""
        if self._start_backward(d) or self._start_forward(d) or not self.weights[d]:
            return
        stage, j = self.weights[d][0]
        arrivals, patience_ms = self.gradient_arrivals[d], self.policy.patience * self.ms[W][stage][self.alike[j]]
        if not (arrivals and arrivals[0] - self.now < patience_ms):
            self.weights[d].popleft()
            self._start(W, stage, j, 0)

    def _fits(self, d: int, more: int) -> bool:
        return self.held[d] + more <= self.memory[d]

    def _start(self, kind: Kind, stage: int, j: int, takes: int, level: int = 0) -> None:
        """Start an op, and send its result to the next stage."""
        d = self.device[stage]
        self.record_start(kind, stage, j, level)
        self.held[d] += takes
        self.busy[d] = True
        if kind not in (F, B, BW):
            return
        self.note_pace(kind, stage, j)
        route, k, ms = self.route[j], self.position[j][stage], self.ms[kind][stage][self.alike[j]]
        if kind == F and k < len(route) - 1:
            self._send(F, route[k + 1], j, ms)
        elif kind == F:
            self._send(B, stage, j, ms)
        elif k > 0:
            self._send(B, route[k - 1], j, ms)

    def _send(self, kind: Kind, to: int, j: int, after_ms: float) -> None:
        there = self.device[to]
        arrives = self.now + after_ms + self.message_ms(FORWARDS if kind == F else GRADIENTS, to, j)
        self.foresee(arrives, ARRIVAL + kind, to, j)
        if kind == B:
            heapq.heappush(self.gradient_arrivals[there], arrives)

    def _start_backward(self, d: int) -> bool:
        """Start the oldest backward whose activation is there; else the oldest recompute that one waits for."""
        for n, (_, j, stage) in enumerate(self.backwards[d]):
            if self.relief[stage, j].is_recomputed or not self.transfers.is_resident(stage, j):
                continue
            split = self.policy.split and self._can_split[stage] and self._fits(d, self.takes[B][stage][self.alike[j]])
            kind = B if split else BW
            takes = self.takes[kind][stage][self.alike[j]]
            if not self._fits(d, takes):
                continue
            del self.backwards[d][n]
            del self.relief[stage, j]
            self.transfers.forget(stage, j)
            self.in_flight[stage] -= 1
            self._start(kind, stage, j, takes)
            return True
        for _, j, stage in self.backwards[d]:
            level = self.relief[stage, j].level
            if level < 0 or not self.transfers.is_resident(stage, j):
                continue
            takes = self.level_takes[level][C][stage][self.alike[j]]
            if self._fits(d, takes) and self.reserve.lend_for_return(stage, j):
                self.transfers.forget(stage, j)
                self._start(C, stage, j, takes, level)
                return True
        return False

    def _start_forward(self, d: int) -> bool:
        """Start the forward farthest along its route among those that limit and memory admit.

        The limit does not hold for the oldest micro-batch, nor has it to leave room for what comes back.
        """
        heads = [(j, stage) for stage, queue in self.forwards[d].items() if queue for _, j in queue[:1]]
        for j, stage in sorted(heads, key=lambda item: -self.position[item[0]][item[1]]):
            is_oldest = j == self.reserve.in_flight[0] if self.reserve.in_flight else True
            if not (is_oldest or self.in_flight[stage] < self.policy.in_flight[stage]):
                continue
            room = 0 if is_oldest else self.transfers.room_for_return(d)
            takes = self.takes[F][stage][self.alike[j]]
            if not self._fits(d, takes + room) or not self._settle_relief(stage, j):
                continue
            heapq.heappop(self.forwards[d][stage])
            if self.position[j][stage] == 0:
                self.rank[j] = self.admitted
                self.admitted += 1
            self.in_flight[stage] += 1
            self.forwards_left[d] -= 1
            self._start(F, stage, j, takes)
            return True
        return False

    def _settle_relief(self, stage: int, j: int) -> bool:
        """Decide what becomes of an activation: what the policy prefers, or what all in flight can be finished with.

        Returns False, and decides nothing, if memory admits neither.
        """
        base = self.base[self.alike[j]][stage]
        of = self.problem.stages[stage]
        preferred = self.policy.relief(stage, self.place[j], of.offload_parts, len(of.all_levels))
        can_finish = not preferred.is_recomputed or self.reserve.recomputes_freely(stage, j, preferred.level)
        if base != STAYS or not can_finish:
            preferred = base
        for relief in dict.fromkeys((preferred, base)):
            if self.reserve.lend(stage, j, self.reserve.loan(stage, j, relief)):
                self.relief[stage, j] = relief
                return True
        return False
