"""Which window of a schedule is to be solved next: around a moment at which a device stands idle, as wide as can be
solved quickly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from optpipe.model.ops import COMPUTE
from optpipe_solver.cpsat.ticks import Ticks
from optpipe_solver.cpsat.timed import Timed
from optpipe_solver.cpsat.whole import Window, everything

FIRST = 60  # compute ops in the first windows
FEWEST = 8
QUICK_S = 0.3  # a window solved sooner may grow, at first
PATIENCE = 6  # times as long is spent on one window
VAIN = 10  # windows without a gain, and larger ones have more time
MEMORY = 0.9  # of a breadth's score, from one window to the next
LEAST = 0.3  # of the best breadth's chance, which each keeps


@dataclass
class Breadth:
    """So many neighbouring devices are free at a time, with so many of their compute ops; `score` is what that gained
    of late, ms/s."""

    devices: int
    most: int  # compute ops of so many devices
    size: float = FIRST
    score: float = 0.0

    def learn(self, gained_ms: float, used_s: float, proven: bool, quick_s: float) -> None:
        """From one window: whether such windows pay, and whether larger or smaller ones are to be tried."""
        self.score += (1 - MEMORY) * (gained_ms / max(used_s, quick_s) - self.score)
        if proven and used_s < quick_s:
            self.size = min(self.most, 1.15 * self.size)
        elif not proven or used_s > 2 * quick_s:
            self.size = max(FEWEST, 0.85 * self.size)


class Choice:
    """An adaptive choice of windows: breadths by what they gained, places by where time is lost."""

    def __init__(self, ticks: Ticks, chance: random.Random) -> None:
        self.ticks, self.problem, self.chance = ticks, ticks.problem, chance
        self.quick_s, self.vain = QUICK_S, 0
        devices = len(self.problem.devices)
        ops = 3 * len(self.problem.stages) * self.problem.microbatches
        self.breadths = [
            Breadth(n, ops * n // devices) for n in sorted({max(min(2, devices), devices // cut) for cut in (1, 2, 4)})
        ]

    def window(self, known: Timed) -> tuple[Breadth, Window]:
        least = max(1e-9, *(breadth.score for breadth in self.breadths)) * LEAST
        breadth = self.chance.choices(self.breadths, [breadth.score + least for breadth in self.breadths])[0]
        idle = list(self._idle(known))
        device, begin, end = (
            self.chance.choices(idle, [end - begin for _, begin, end in idle])[0] if idle else (0, 0, known.end)
        )
        return breadth, self._around(known, breadth, device, self.chance.randint(begin, end))

    def learn(self, breadth: Breadth, gained_ms: float, used_s: float, proven: bool) -> None:
        """From one window, for the next ones."""
        breadth.learn(gained_ms, used_s, proven, self.quick_s)
        self.vain = 0 if gained_ms else self.vain + 1
        if self.vain >= VAIN:
            self.quick_s, self.vain = self.quick_s * 1.5, 0

    def _around(self, known: Timed, breadth: Breadth, device: int, moment: int) -> Window:
        """The ops nearest to a moment, of devices next to one."""
        last = len(self.problem.devices) - breadth.devices
        first = self.chance.randint(max(0, device - breadth.devices + 1), min(device, last))
        devices = frozenset(range(first, first + breadth.devices))
        starts = sorted(
            at for x, at in known.start.items() if x.kind in COMPUTE and self.problem.stages[x.stage].device in devices
        )
        near = sorted(starts, key=lambda at: abs(at - moment))[: round(breadth.size)]
        if len(near) == len(starts):
            window = everything(known)
            near = [window.begin, window.end - 1]
        return Window(min(near), max(near) + 1, devices if breadth.devices < len(self.problem.devices) else None)

    def _idle(self, known: Timed) -> Iterator[tuple[int, int, int]]:
        """Device, begin and end of every time at which a device computes nothing."""
        reached = [0] * len(self.problem.devices)
        compute = [(at, x) for x, at in known.start.items() if x.kind in COMPUTE]
        runs = sorted(
            (at, at + self.ticks.lasts(x.kind, x.stage), self.problem.stages[x.stage].device) for at, x in compute
        )
        for begin, end, device in [*runs, *((known.end, known.end, d) for d in range(len(reached)))]:
            if begin > reached[device]:
                yield device, reached[device], begin
            reached[device] = max(reached[device], end)
