"""`PlannedStep`: a step with a schedule of its own, and `PlannedTrials`: which of them are undone where a rank runs out
of memory, as the first step by a loaded schedule is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import gt

from optpipe.errors import InputError, OptPipeError
from optpipe_runtime.execute.learner import Given
from optpipe_runtime.lowering.plan import Plan
from optpipe_runtime.ranks.cpu_group import CpuGroup

log = logging.getLogger("optpipe.runtime")


@dataclass
class PlannedStep:
    """A step that all ranks have prepared.

    Attributes
    ----------
    plan
        By which it runs.
    given
        What each rank has of its micro-batches.
    one_at_a_time
        Makes the plan that runs one micro-batch at a time, if a rank runs out of memory; None if this rank cannot run
        it.
    """

    plan: Plan
    given: Sequence[Given | InputError]
    one_at_a_time: Callable[[], Plan | None]


class PlannedTrials:
    """A planned step is on trial if it may hold more bytes than all before it. The same on every rank."""

    def __init__(self, cpu_group: CpuGroup) -> None:
        self._cpu_group = cpu_group
        self._most_bytes: list[int] = []  # certified for each device, of all planned steps that have run

    def is_due(self, plan: Plan) -> bool:
        return not self._most_bytes or any(map(gt, _certified(plan), self._most_bytes))

    def end_step(self, plan: Plan) -> None:
        peaks = _certified(plan)
        self._most_bytes = list(map(max, peaks, self._most_bytes or peaks))

    def give_up(self, step: PlannedStep, complaint: str) -> None:
        """Collective, after a step on trial that some rank could not finish: it is to run one micro-batch at a time.
        Raises `OptPipeError` if it did that already."""
        why = next(text for text in self._cpu_group.gather(complaint) if text)
        plan = step.one_at_a_time()
        if plan is not None and plan.digest == step.plan.digest:
            plan = None
        if not self._cpu_group.all_equal(None if plan is None else plan.number):
            raise OptPipeError(
                f"{why}; the step is undone: leave it out or cut its largest micro-batch, and give a smaller "
                "activation_budget_bytes"
            )
        assert plan is not None
        if self._cpu_group.rank == 0:
            log.warning(
                "%s; the step runs again, one micro-batch at a time: give a smaller activation_budget_bytes", why
            )
        step.plan = plan


def _certified(plan: Plan) -> list[int]:
    """The most bytes that each device may hold."""
    return [peak.bytes for peak in plan.certificate.device]
