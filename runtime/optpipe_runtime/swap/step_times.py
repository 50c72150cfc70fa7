"""`StepTimes`: whether the newest schedule is slower than the one before, by the times of its steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import sqrt
from statistics import median

from optpipe_runtime.lowering.plan import Plan

LOOKS = (5, 10, 20)  # the numbers of measured steps after which the newest schedule is compared
TOLERANCE = 0.02  # of the step time: a schedule that is slower by less is kept


@dataclass
class TimedPlan:
    """Step times of a plan: ms of the slowest rank, without the first step after a swap. Medians are compared, so that
    a few slow steps do not count."""

    plan: Plan
    ms: deque[float] = field(default_factory=lambda: deque(maxlen=LOOKS[-1]))

    @property
    def median(self) -> float:
        return median(self.ms)

    @property
    def error(self) -> float:
        """The standard error of the median, from the median absolute deviation, as for a normal distribution."""
        middle = self.median
        return 1.2533 * 1.4826 * median(abs(ms - middle) for ms in self.ms) / sqrt(len(self.ms))


class StepTimes:
    """Compares schedules by their measured steps. Given the same times, every rank comes to the same result. The newest
    schedule is too slow if its median exceeds that of the last one with enough steps by more than `TOLERANCE` of it and
    by more than three standard errors of the difference."""

    def __init__(self) -> None:
        self._now: TimedPlan | None = None
        self._before: TimedPlan | None = None  # the last one with enough steps
        self._first = True  # the next step is the first after a swap

    def swapped(self, plan: Plan, comparable: bool) -> None:
        """`plan` runs from now on. If it is not `comparable`, forget what was measured before."""
        if self._now is not None and len(self._now.ms) >= LOOKS[0]:
            self._before = self._now
        if not comparable:
            self._before = None
        self._now, self._first = TimedPlan(plan), True

    def forget(self) -> None:
        """Drops what was measured: the batch or the model has changed."""
        if self._now is not None:
            self.swapped(self._now.plan, comparable=False)

    def add(self, ms: float) -> tuple[TimedPlan, TimedPlan] | None:
        """Takes a step's time. If the newest schedule proves too slow, returns it and the one to go back to."""
        if self._now is None or self._first:
            self._first = False
            return None
        self._now.ms.append(ms)
        if self._before is None or len(self._now.ms) not in LOOKS:
            return None
        slower = self._now.median - self._before.median
        if slower <= max(TOLERANCE * self._before.median, 3 * sqrt(self._now.error**2 + self._before.error**2)):
            if len(self._now.ms) == LOOKS[-1]:
                self._before = None  # it is not slower
            return None
        return self._now, self._before
