"""`RunningSchedule`: which schedule a pipeline runs, which one it replaced, and when to go back to that one.

It goes back if an offered schedule is measured to be slower (one that the user loads is meant to run), or if the first
step by it runs out of memory. That step is then undone on all ranks, and repeated."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from math import sqrt
from statistics import median

from optpipe.errors import OptPipeError, ScheduleError
from optpipe_runtime.lowering.plan import Plan
from optpipe_runtime.ranks.cpu_group import CpuGroup

log = logging.getLogger("optpipe.runtime")

LOOKS = (5, 10, 20)  # after so many measured steps the newest schedule is compared
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
    """Compares schedules by their measured steps. Given the same times, every rank comes to the same result.

    The newest schedule is too slow if its median exceeds that of the last one with enough steps by more than
    `TOLERANCE` of it and by more than three standard errors of the difference."""

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
        """Takes the time of a step. If the newest schedule is now known to be too slow, returns it and the one to go
        back to."""
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


class RunningSchedule:
    """The same on every rank."""

    def __init__(self, cpu_group: CpuGroup) -> None:
        self.plan: Plan | None = None
        self.version = 0  # how many schedules have been swapped in
        self.on_trial = False  # whether the next step is the first one by this schedule
        self._cpu_group, self._steps = cpu_group, 0
        self._before: Plan | None = None  # to go back to from a schedule that is on trial
        self._refused: set[str] = set()  # digests of schedules that went wrong
        self._step_times = StepTimes()
        self.back: tuple[Plan, str] | None = None  # the schedule to go back to before the next step, and why

    def swap(self, plan: Plan, offered: bool, going_back: str = "") -> None:
        """`plan` runs from now on. `going_back` says what was wrong with the schedule before, if it is that."""
        if self._cpu_group.rank == 0:
            text = f"step {self._steps + 1}: schedule {_name(plan)} (predicted {plan.schedule.makespan_ms:.1f} ms)"
            text += f" replaces {_name(self.plan)}" if self.plan else ""
            log.info("%s", f"{text}, which {going_back}" if going_back else text)
        if going_back:
            assert self.plan is not None
            self._refused.add(self.plan.digest)
        elif not offered:
            self._refused.discard(plan.digest)
        self._step_times.swapped(plan, comparable=offered)
        self._before, self.plan, self.on_trial = None if going_back else self.plan, plan, True
        self.version += 1
        self.back = None

    def heard(self, step_ms: float | None, same_batch: bool) -> None:
        """What the ranks have told each other with a step.

        `step_ms` is the time of an earlier step on the slowest rank, by the schedule that runs. `same_batch` tells
        whether batch and model are of the same shapes as before.
        """
        slower = None if step_ms is None else self._step_times.add(step_ms)
        if not same_batch:
            self._step_times.forget()
        elif slower is not None:
            slow, before = slower
            self.back = before.plan, f"takes {slow.median:.1f} ms a step, measured, and this one {before.median:.1f} ms"

    def end_step(self) -> None:
        self._steps, self.on_trial, self._before = self._steps + 1, False, None

    def give_up(self, complaint: str) -> tuple[Plan, str]:
        """Collective, after a first step that some rank could not finish: the schedule to go back to, and why. Raises
        `OptPipeError` if there is none."""
        why = next(text for text in self._cpu_group.gather(complaint) if text)
        if self._before is None:
            raise OptPipeError(
                f"{why}; the step is undone, and there is no schedule to go back to: load one that needs less memory"
            )
        return self._before, f"ran out of memory: {why}"

    def require_not_refused(self, plan: Plan) -> None:
        """Raises `ScheduleError` for a schedule that went wrong before. Loading it makes it welcome again."""
        if plan.digest in self._refused:
            raise ScheduleError(f"{_name(plan)} has run here before, and was slower than another or ran out of memory")


def _name(plan: Plan) -> str:
    return plan.schedule.method or plan.digest[:8]
