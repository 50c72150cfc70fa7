"""`RunningSchedule`: which schedule a pipeline runs, which one it replaced, and when to go back to that one.

It goes back if the new schedule is measured to be slower (only for an offered one: a schedule that the user loads is
meant to run), or if the first step by it runs out of memory. That step is then abandoned on all ranks: the rank that
ran out lets the others finish theirs with zeros, all meet, and what the step has changed is restored, so that the
schedule before can repeat it."""

from __future__ import annotations

import logging

from optpipe.errors import OptPipeError, ScheduleError
from optpipe_runtime.lowering.plan import Plan
from optpipe_runtime.ranks.cpu_group import CpuGroup
from optpipe_runtime.swap.step_times import StepTimes

log = logging.getLogger("optpipe.runtime")


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
