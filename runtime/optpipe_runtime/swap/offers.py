"""`Offers`: schedules that are offered on rank 0 while the training runs.

Each is prepared on every rank beside the training. With each step the ranks vote how far they are, and before the first
step after that in which all were ready, they swap. No step waits for one that is still being prepared.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from optpipe.errors import InputError, OptPipeError
from optpipe.schedule import Schedule
from optpipe_runtime.lowering.plan import Plan
from optpipe_runtime.ranks.cpu_group import CpuGroup
from optpipe_runtime.ranks.team import LostError

log = logging.getLogger("optpipe.runtime")

REFUSED, PREPARING, READY = 0, 1, 2  # the minimum over all ranks counts
REFUSAL = "a schedule was offered and refused, training goes on with the one it has: %s"


class Offers:
    """Prepares one offer at a time. If a rank refuses it, all ranks keep what they have.

    `prepare` gets rank 0's schedule in a thread of its own on every rank, and may use collectives that the training
    does not. `accept` raises `OptPipeError` if this rank cannot run the plan. `due`, on all ranks alike: all are ready
    to swap.
    """

    def __init__(
        self,
        cpu_group: CpuGroup,
        prepare: Callable[[Schedule | None], Plan],
        accept: Callable[[Plan], None],
    ) -> None:
        self._cpu_group, self._prepare, self._accept = cpu_group, prepare, accept
        self._lock = threading.Lock()
        self._newest: Schedule | None = None  # offered and not yet shared; a newer offer replaces it
        self._preparation: _Preparation | None = None
        self.due = False

    def offer(self, schedule: Schedule) -> None:
        """From any thread of rank 0. Returns at once."""
        if not isinstance(schedule, Schedule):
            raise InputError(f"offer was given a {type(schedule).__name__}: an optpipe.Schedule can be offered")
        with self._lock:
            self._newest = schedule

    @property
    def preparing(self) -> bool:
        """Whether an offer is being prepared: between two steps the same on all ranks."""
        return self._preparation is not None

    def votes(self) -> tuple[int, int]:
        """What this rank votes with a step. `count` takes the minimum of each over all ranks."""
        with self._lock:
            nothing_new = self._newest is None
        return READY if self._preparation is None else self._preparation.state, nothing_new

    def count(self, state: int, nothing_new: int) -> None:
        """With the same step, on every rank: the votes of all."""
        if self._preparation is not None:
            self.due = state == READY
            if state == REFUSED:
                self._preparation = None
        elif not nothing_new:
            with self._lock:
                schedule, self._newest = self._newest, None
            self._preparation = _Preparation(lambda: self._prepare(schedule))

    def take(self) -> Plan | None:
        """Collective, between two steps, when a swap is `due`: the plan to swap to, on every rank, or None."""
        assert self._preparation is not None
        plan, self._preparation, self.due = self._preparation.plan, None, False
        try:
            if plan is not None:
                self._accept(plan)
        except OptPipeError as error:
            log.warning(REFUSAL, error)
            plan = None
        return plan if self._cpu_group.all_equal(None if plan is None else plan.number) else None

    def close(self) -> None:
        if self._preparation is not None:
            self._preparation.join()


class _Preparation(threading.Thread):
    """One offer being prepared."""

    def __init__(self, prepare: Callable[[], Plan]) -> None:
        super().__init__(name="optpipe-prepare", daemon=True)
        self._prepare = prepare
        self.plan: Plan | None = None
        self.start()

    def run(self) -> None:
        try:
            self.plan = self._prepare()
        except LostError:
            pass  # the next step of every rank will report it
        except OptPipeError as error:
            log.warning(REFUSAL, error)
        except Exception:
            log.exception("a schedule was offered and could not be prepared, training goes on with the one it has")

    @property
    def state(self) -> int:
        return PREPARING if self.is_alive() else READY if self.plan is not None else REFUSED
