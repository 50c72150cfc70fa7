"""The engine `anneal`: simulated annealing of schedules.

A move changes the order of two ops of a device, mostly where the last op to end waits for it, and mostly does the same
for other micro-batches. So it changes what repeats as easily as the beginning and the end. Other moves let a part of an
activation leave its device, or stay; or an activation be recomputed, where it cannot leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import numpy as np

from optpipe.evaluate.jit import compile_at_once
from optpipe.evaluate.objective import Objective
from optpipe.model.arrays import NONE
from optpipe.model.problem import Problem
from optpipe.process.protocol import Ready, Request
from optpipe.schedule import Schedule
from optpipe_solver.anneal.arrays import new_room, ops_of
from optpipe_solver.clock import Clock
from optpipe_solver.cpsat.grid import ensure_start, is_expressible
from optpipe_solver.incumbents import Emit, Incumbents

METHOD = "anneal"
MOST_THREADS: int | None = 1
OPEN_ENDED = False
ALONE = False
OPS_PER_S = 7e7  # timed or looked at; slower machines take up to twice the time that is counted
OPS_AT_A_TIME = 2_000_000  # before the clock is looked at
HOT = 0.1  # how much longer the next order may be at first: in times of an op and of the logarithm of the tries per op
HOT_MOVING = 0.015  # likewise where activations can leave or be recomputed, which changes more
COLD = 0.02  # at last, in times of that


def unsupported(problem: Problem) -> str | None:
    """Why the engine cannot work on this problem, None if it can."""
    costs = problem.costs
    if costs.can_evict.any() or costs.host_is_scarce.any() or problem.shared_links:
        return "activations may go to peers, through shared links or to scarce host memory, which it does not do"
    return None if costs.ms.any() else "nothing takes any time"


def run(request: Request, emit: Emit) -> float | None:
    """Emits better and better schedules until time is up; returns the seconds used by its own count of ops."""
    compile_at_once()
    incumbents = Incumbents.of_engine(request, emit, is_expressible)
    start = ensure_start(incumbents)
    if start is None:
        return None
    annealing = Annealing(start, request.objective, request.seed)
    emit(Ready())
    clock = Clock(request.time_limit_s, counts=True, wall_s=inf)
    for schedule in annealing.improvements(clock):
        incumbents.offer(schedule)
    return clock.spent_s


class Annealing:
    """The annealing of one schedule, of a problem that the engine supports and without pairs.

    Attributes
    ----------
    ops
        How many there are, with the transfers of all that can leave.
    op_ms
        The mean time of one.
    """

    def __init__(self, schedule: Schedule, objective: Objective, seed: int) -> None:
        from optpipe_solver.anneal.loops import anneal  # imports numba

        self._problem, self._anneal = schedule.problem, anneal
        self._seed, self._span = seed, objective == "span"
        self._ops, self._table = ops_of(schedule)
        self.ops, self.op_ms = len(self._table), float(self._ops.ms.mean())
        self._room = new_room(self._ops)
        self._order, self._best = self._ops.first.copy(), self._ops.first.copy()
        self._lengths_ms = np.full(2, inf)  # of both
        self.go_on(0.0, 0)

    @property
    def best_ms(self) -> float:
        return float(self._lengths_ms[1])

    def best(self) -> Schedule:
        """Return the shortest schedule so far."""
        return Schedule.in_order(self._problem, self._table[self._best[self._best != NONE]], method=METHOD)

    def improvements(self, clock: Clock) -> Iterator[Schedule]:
        """Yield better and better schedules, ever colder until the clock is over."""
        hot = HOT_MOVING if len(self._ops.choices) else HOT
        hot_ms = hot * self.op_ms * np.log2(1 + clock.seconds * OPS_PER_S / self.ops**2)
        while not clock.over:
            best_ms = self.best_ms
            clock.count(self.go_on(hot_ms * COLD ** (1 - clock.left_s / clock.seconds), OPS_AT_A_TIME), OPS_PER_S)
            if self.best_ms < best_ms:
                yield self.best()

    def go_on(self, hot_ms: float, ops: int) -> int:
        """Try moves after which so many ops in all are to be timed at most; return how many were timed or looked at.

        `hot_ms` is what an order may take more than the one before, on average.
        """
        self._seed = (self._seed + 1) % 2**31
        arrays = self._ops, self._order, self._best, self._room, self._lengths_ms
        return int(self._anneal(*arrays, hot_ms, -(-ops // self.ops), self._span, self._seed))
