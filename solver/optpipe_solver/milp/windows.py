"""Which window of the best schedule the MILP solves next: around one moment after another, as wide as is quick."""

from __future__ import annotations

import random

from optpipe.model.problem import Problem
from optpipe_solver.milp.reading import Reading, Window

FIRST_OPS = 30  # compute ops in the first windows
FEWEST_OPS = 8  # in a window
QUICK_S = 0.5  # at first windows that are solved sooner may grow
MOST_S = 2.0  # for one window


class WindowChoice:
    """Windows of all devices, of half of them, and of two, by turns, each with as many ops as are solved quickly."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self._problem, self._random, self._turn = problem, random.Random(seed), 0
        devices = len(problem.devices)
        self._breadths = sorted({min(devices, n) for n in (2, -(-devices // 2), devices)}, reverse=True)
        self._ops = dict.fromkeys(self._breadths, float(FIRST_OPS))

    def window(self, reading: Reading) -> Window:
        """The compute ops nearest to a moment, on some devices next to each other."""
        self._turn = (self._turn + 1) % len(self._breadths)
        breadth = self._breadths[self._turn]
        first = self._random.randint(0, len(self._problem.devices) - breadth)
        stages, devices = self._problem.stages, range(first, first + breadth)
        ops = [op for op in reading.compute if stages[op.stage].device in devices]
        moment = self._random.uniform(0.0, max(reading.compute[op].end for op in ops))
        ops.sort(key=lambda op: abs(reading.compute[op].start - moment))
        return Window(reading, frozenset(ops[: round(self._ops[breadth])]))

    def learn(self, proven: bool, seconds: float) -> None:
        """Whether windows such as the last one may be larger, or have to be smaller."""
        breadth = self._breadths[self._turn]
        grows = proven and seconds < QUICK_S
        self._ops[breadth] = max(FEWEST_OPS, self._ops[breadth] * (1.2 if grows else 0.8 if not proven else 1.0))
