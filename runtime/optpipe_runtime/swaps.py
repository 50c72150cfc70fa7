"""`Swaps`: which schedule a pipeline runs, what it replaced, and when it goes back.

It goes back to the schedule before when the new one is measured to be slower (`pace`; only from one that was offered:
what is loaded is meant), or when its first step runs out of memory. That step is abandoned on all ranks: whoever ran
out lets the others finish theirs with zeros, all meet, and what the step has changed is put back, so that the schedule
before can repeat it. Put back are gradients, the buffers that forwards write, a batch changed in place, and torch's
random numbers; what modules keep in Python is not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from optpipe.errors import OptPipeError, ScheduleError
from optpipe_runtime.execute.lowering import Plan
from optpipe_runtime.measure.pace import Pace
from optpipe_runtime.ranks.agreement import Council
from optpipe_runtime.ranks.rank import Rank

log = logging.getLogger("optpipe.runtime")


class Swaps:
    """On every rank the same."""

    def __init__(self, council: Council) -> None:
        self.plan: Plan | None = None
        self.version = 0  # how many schedules have been swapped in
        self.on_trial = False  # the next step is the first one by this schedule
        self._council, self._steps = council, 0
        self._before: Plan | None = None  # to go back to from one that is on trial
        self._refused: set[str] = set()  # digests of what went wrong once
        self._pace = Pace()

    def take(self, plan: Plan, offered: bool, why: str = "") -> None:
        """`plan` runs from now on; `why` it must."""
        if self._council.rank == 0:
            text = f"step {self._steps + 1}: schedule {_named(plan)} (predicted {plan.schedule.makespan_ms:.1f} ms)"
            text += f" replaces {_named(self.plan)}" if self.plan else ""
            log.info("%s", f"{text}, which {why}" if why else text)
        if why:
            assert self.plan is not None
            self._refused.add(self.plan.digest)
        elif not offered:
            self._refused.discard(plan.digest)
        self._pace.swapped(plan, comparable=offered)
        self._before, self.plan, self.on_trial = None if why else self.plan, plan, True
        self.version += 1

    def begin_step(self, last_ms: float | None, known: bool) -> tuple[Plan, str] | None:
        """After the step that took the slowest rank `last_ms`, before one whose batch is `known` to be of the same
        kind: the schedule to go back to, and why."""
        found = None if last_ms is None else self._pace.add(last_ms)
        if not known:
            self._pace.forget()
            return None
        if found is None:
            return None
        slow, before = found
        return before.plan, f"takes {slow.median:.1f} ms a step, measured, and this one {before.median:.1f} ms"

    def end_step(self) -> None:
        self._steps, self.on_trial, self._before = self._steps + 1, False, None

    def give_up(self, complaint: str) -> tuple[Plan, str]:
        """Collective, after the first step of a schedule that some rank could not finish: the schedule to go back to,
        and why. Where there is none, `OptPipeError`."""
        why = next(text for text in self._council.gather(complaint) if text)
        if self._before is None:
            raise OptPipeError(
                f"{why}; the step is undone, and there is no schedule to go back to: load one that needs less memory"
            )
        return self._before, f"ran out of memory: {why}"

    def require_welcome(self, plan: Plan) -> None:
        """Raises `ScheduleError` for a schedule that went wrong once, unless it is loaded."""
        if plan.digest in self._refused:
            raise ScheduleError(f"{_named(plan)} has run here before, and was slower than another or ran out of memory")


def snapshot(rank: Rank, batch: Sequence[Any]) -> Callable[[], None]:
    """What a step changes on this rank, of the batch, too, where stages do so in place. Returns what puts it back."""
    stages = [stage.snapshot() for stage in rank.stages.values()]
    passages = [
        passage
        for stage in rank.stages.values()
        for passage in stage.passages.values()
        if passage.begins or passage.ends
    ]
    given = [
        tensor
        for value in batch
        for tensor in (value if isinstance(value, tuple | list) else (value,))
        if isinstance(tensor, Tensor)
    ]
    copies = (
        [(tensor, tensor.clone()) for tensor in given] if any(passage.changes_inputs for passage in passages) else []
    )
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(rank.device) if rank.device.type == "cuda" else None

    def restore() -> None:
        for put_back in stages:
            put_back()
        for tensor, copy in copies:
            tensor.data.copy_(copy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, rank.device)

    return restore


def ran_out(error: BaseException) -> bool:
    """Whether a device, the host or the host pool had too little memory, and nothing else is wrong."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or type(error) is OptPipeError


def _named(plan: Plan) -> str:
    return plan.schedule.method or plan.digest[:8]
