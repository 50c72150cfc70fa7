"""Other devices on a micro-batch's way: each does its ops on that way for one micro-batch after the other."""

from __future__ import annotations

from typing import NamedTuple

from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe_solver.bounds.paths import shortest_times


class Bottleneck(NamedTuple):
    """A device that all micro-batches pass between two ops on another device.

    Of n micro-batches that come after some moment, it does all ops on that way before the last of them is back. So one
    micro-batch needs `passes_ms` at least, and each further one `works_ms` more.

    Attributes
    ----------
    passes_ms
        For one micro-batch, from the end of the one op to the start of the other: the way there, this device's ops
        without what lies between them, and the way back.
    works_ms
        Of this device's ops on this way.
    """

    passes_ms: float
    works_ms: float


class RoundTrip:
    """The forwards and input gradients of a micro-batch that waits for nothing, in this order."""

    def __init__(self, problem: Problem, microbatch: int) -> None:
        route, ms = problem.route(microbatch), shortest_times(problem, microbatch)
        ops = [(Kind.F, s) for s in route] + [(Kind.B, s) for s in reversed(route)]
        self.device = [problem.stages[s].device for _, s in ops]
        self.ms = [float(ms[op]) for op in ops]
        there, back = problem.costs.message_ms[:, :, microbatch].tolist()
        message_ms = [*(there[s] for s in route), *(back[s] for s in reversed(route))]
        self.start: list[float] = []
        now = 0.0
        for i, op_ms in enumerate(self.ms):
            now += message_ms[i]
            self.start.append(now)
            now += op_ms

    def bottlenecks(self, a: int, b: int) -> list[Bottleneck]:
        """The devices between ops a and b, without a's own."""
        devices = sorted({*self.device[a + 1 : b]} - {self.device[a]})
        return [self._bottleneck(d, a, b) for d in devices]

    def _bottleneck(self, d: int, a: int, b: int) -> Bottleneck:
        ops = [i for i in range(a + 1, b) if self.device[i] == d]
        works_ms = sum(self.ms[i] for i in ops)
        way_there, way_back = self.start[ops[0]] - self._end(a), self.start[b] - self._end(ops[-1])
        return Bottleneck(way_there + works_ms + way_back, works_ms)

    def _end(self, i: int) -> float:
        return self.start[i] + self.ms[i]
