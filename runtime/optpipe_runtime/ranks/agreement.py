"""How all ranks come to run the same schedule: over a CPU group, at step boundaries, never waiting for one that is
still being prepared."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist

from optpipe.errors import InputError, OptPipeError
from optpipe.schedule import Schedule
from optpipe_runtime.execute.lowering import Plan
from optpipe_runtime.ranks.team import LostError, Team

log = logging.getLogger("optpipe.runtime")

T = TypeVar("T")

MOST_VALUES = 6  # of one vote
PREPARING, READY, REFUSED = 1, 2, 0  # the least of all ranks' answers counts
REFUSAL = "a schedule was offered and refused, training goes on with the one it has: %s"


class Council:
    """The ranks' CPU group and the few things they agree on."""

    def __init__(self, team: Team) -> None:
        self.rank, self._team = team.number, team
        self._group = team.subgroup(range(team.size), torch.device("cpu"))
        self._called = ""

    def enter(self, called: str) -> None:
        """What this rank does from now on; each vote tells whether all do."""
        self._called = called

    def least(self, *values: int) -> list[int]:
        """Collective: the minimum of each value over all ranks; `OptPipeError` on every rank where they do different
        things."""
        number = crc32(self._called.encode())
        unused = [0] * (
            MOST_VALUES - len(values)
        )  # ranks that differ in what they do must not differ in how many bytes they send
        votes = torch.tensor([number, -number, *values, *unused], dtype=torch.int64)
        self._group.reduce(votes, dist.ReduceOp.MIN).wait()
        first, minus_last, *least = (int(vote) for vote in votes)
        if first != -minus_last:
            raise OptPipeError(
                f"rank {self.rank} has called {self._called}, and another rank something else: all call the same, "
                "in the same order"
            )
        return least[: len(values)]

    def tell(self, value: Any, source: int) -> Any:
        """Collective: the value of rank `source`, on every rank."""
        return self._group.tell(value, source)

    def gather(self, value: Any) -> list[Any]:
        """Collective: every rank's value, by rank."""
        return self._group.gather(value)

    def each(self, make: Callable[[], T]) -> T:
        """Collective: what `make` returns here; where it fails on any rank, the others raise an `InputError` that says
        so."""
        failure: Exception | None = None
        try:
            made = make()
        except Exception as error:
            failure = error
        told = self.gather(None if failure is None else self._team.blame(failure))
        if failure is not None:
            raise failure
        for text in told:
            if text is not None:
                raise InputError(text)
        return made

    def share(self, schedule: Schedule | None) -> Schedule:
        """Collective: rank 0's schedule, on every rank; `InputError` on every rank where rank 0 has none."""
        parts = None
        if isinstance(schedule, Schedule):
            parts = schedule.problem, schedule.programs, dict(schedule.links), schedule.method
        if (shared := self.tell(parts, 0)) is None:
            raise InputError(
                "load was given no optpipe.Schedule on rank 0, whose schedule counts; a search that finds none "
                "has a reason"
            )
        return Schedule(*shared)

    def agree(self, plan: Plan | None) -> bool:
        """Collective: whether every rank has prepared a plan, and the same one."""
        number = -1 if plan is None else int(plan.digest[:15], 16)
        least, minus_most = self.least(number, -number)
        return least >= 0 and least == -minus_most


class Offers:
    """Schedules offered on rank 0 while training runs. Each is prepared beside the training on every rank, and taken
    when all are ready.

    `boundary` is one small collective between two steps. Where a rank refuses an offer, all keep what they have. An
    offer is handed over `aside`, by the threads that prepare it.
    """

    def __init__(
        self, council: Council, aside: Council, prepare: Callable[[Schedule], Plan], reserve: Callable[[Plan], None]
    ) -> None:
        self._council, self._aside, self._prepare, self._reserve = council, aside, prepare, reserve
        self._lock = threading.Lock()
        self._newest: Schedule | None = None  # offered, not yet shared; a newer offer replaces it
        self._work: _Preparation | None = None

    def offer(self, schedule: Schedule) -> None:
        """From any thread of rank 0; returns at once."""
        if not isinstance(schedule, Schedule):
            raise InputError(f"offer was given a {type(schedule).__name__}: an optpipe.Schedule can be offered")
        with self._lock:
            self._newest = schedule

    @property
    def preparing(self) -> bool:
        """Whether an offer is on its way to the ranks; between two steps the same on all."""
        return self._work is not None

    def boundary(self, *votes: int) -> tuple[Plan | None, list[int]]:
        """Collective: the plan to swap to now, on every rank, or None; and, since all meet here anyway, the minimum of
        each vote."""
        with self._lock:
            waiting = self._newest is not None
        answer, nothing_new, *least = self._council.least(
            READY if self._work is None else self._work.state(), not waiting, *votes
        )
        return self._offered(answer, bool(nothing_new)), least

    def _offered(self, answer: int, nothing_new: bool) -> Plan | None:
        if self._work is not None:
            if answer == PREPARING:
                return None
            work, self._work = self._work, None
            plan = self._reserved(work.plan)
            return plan if self._council.agree(plan) else None
        if not nothing_new:
            with self._lock:
                schedule, self._newest = self._newest, None
            self._work = _Preparation(lambda: self._prepare(self._aside.share(schedule)))
        return None

    def _reserved(self, plan: Plan | None) -> Plan | None:
        """The plan, if this rank has the host memory for it."""
        try:
            if plan is not None:
                self._reserve(plan)
        except OptPipeError as error:
            log.warning(REFUSAL, error)
            return None
        return plan

    def close(self) -> None:
        if self._work is not None:
            self._work.join()


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
            pass  # the ranks will hear of it in their next step
        except OptPipeError as error:
            log.warning(REFUSAL, error)
        except Exception:
            log.exception("a schedule was offered and could not be prepared, training goes on with the one it has")

    def state(self) -> int:
        return PREPARING if self.is_alive() else READY if self.plan is not None else REFUSED
