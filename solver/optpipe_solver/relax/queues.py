"""Other devices on a micro-batch's way: each does its ops on that way for one micro-batch after the other."""

from __future__ import annotations

from typing import NamedTuple

from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe_solver.bounds.length import shortest_times


class Queue(NamedTuple):
    """A device that micro-batches pass between two ops on another one.

    Of n micro-batches that come from some moment on, it has to do all of its ops on that way until the last of them is
    back. So that one needs `passes_ms` at least, and `lasts_ms` for each of the others.

    Attributes
    ----------
    passes_ms
        Of one micro-batch, from the end of the one op to the start of the other: its way there, the device's own ops
        without what lies between them, and the way on.
    lasts_ms
        Of the device's own ops on this way.
    """

    passes_ms: float
    lasts_ms: float


class Trip:
    """The forwards and input gradients of a micro-batch that waits for nothing, in this order."""

    def __init__(self, problem: Problem, r: int) -> None:
        route, ms = problem.all_routes[r], shortest_times(problem)
        ops = [(Kind.F, s) for s in route] + [(Kind.B, s) for s in reversed(route)]
        self.device = [problem.stages[s].device for _, s in ops]
        self.ms = [float(ms[op]) for op in ops]
        self.start: list[float] = []
        now = 0.0
        for i, lasts in enumerate(self.ms):
            now += problem.p2p_ms if i and self.device[i] != self.device[i - 1] else 0.0
            self.start.append(now)
            now += lasts

    def queues(self, a: int, b: int) -> list[Queue]:
        """The devices between ops a and b, without a's own."""
        found = []
        for d in sorted({*self.device[a + 1 : b]} - {self.device[a]}):
            own = [i for i in range(a + 1, b) if self.device[i] == d]
            lasts = sum(self.ms[i] for i in own)
            before, behind = self.start[own[0]] - self._end(a), self.start[b] - self._end(own[-1])
            found.append(Queue(before + lasts + behind, lasts))
        return found

    def _end(self, i: int) -> float:
        return self.start[i] + self.ms[i]
