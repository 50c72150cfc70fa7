"""`Pace`: how long steps take by each schedule, and whether the newest keeps up with the one before it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import sqrt
from statistics import median

from optpipe_runtime.execute.lowering import Plan

LOOKS = (5, 10, 20)  # after so many measured steps the newest schedule is compared
LEAST = 0.02  # of the step time: what is slower by less is kept


@dataclass
class Timed:
    """Step times, in ms, of the slowest rank, without the first after a swap; judged by medians, so that a few slow
    ones do not count."""

    plan: Plan
    ms: deque[float] = field(default_factory=lambda: deque(maxlen=LOOKS[-1]))

    @property
    def median(self) -> float:
        return median(self.ms)

    @property
    def error(self) -> float:
        """The standard error of the median, from the median absolute deviation; the factors are those of a normal
        distribution."""
        middle = self.median
        return 1.2533 * 1.4826 * median(abs(ms - middle) for ms in self.ms) / sqrt(len(self.ms))


class Pace:
    """Compares schedules by their measured steps. On every rank the same, given the same times.

    The newest schedule is too slow when its median is above that of the last one measured enough, by more than `LEAST`
    of that and by more than three standard errors of the difference.
    """

    def __init__(self) -> None:
        self._now: Timed | None = None
        self._before: Timed | None = None  # the last that was measured enough
        self._first = True  # the next step is the first after a swap

    def swapped(self, plan: Plan, comparable: bool) -> None:
        """`plan` runs from now on. Not `comparable`: what was measured before is no measure for it."""
        if self._now is not None and len(self._now.ms) >= LOOKS[0]:
            self._before = self._now
        if not comparable:
            self._before = None
        self._now, self._first = Timed(plan), True

    def forget(self) -> None:
        """What was measured so far was another batch or another model."""
        if self._now is not None:
            self.swapped(self._now.plan, comparable=False)

    def add(self, ms: float) -> tuple[Timed, Timed] | None:
        """A step took so long; where the newest schedule is now known to be too slow, it and the one to go back to."""
        if self._now is None or self._first:
            self._first = False
            return None
        self._now.ms.append(ms)
        if self._before is None or len(self._now.ms) not in LOOKS:
            return None
        slower = self._now.median - self._before.median
        if slower <= max(LEAST * self._before.median, 3 * sqrt(self._now.error**2 + self._before.error**2)):
            if len(self._now.ms) == LOOKS[-1]:
                self._before = None  # it has kept up
            return None
        return self._now, self._before
