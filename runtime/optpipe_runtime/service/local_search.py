"""`LocalSearch`: searches for schedules on this host, in processes of their own, where there is no service."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from optpipe.anytime import improve
from optpipe.errors import OptPipeError
from optpipe.evaluate.objective import NO_SCHEDULE_MS
from optpipe.known import ScheduleCache
from optpipe.model.problem import Problem
from optpipe.options import SolveOptions
from optpipe.process.niceness import NICER
from optpipe.results import Result
from optpipe.schedule import Schedule, check

log = logging.getLogger("optpipe.client")

HERE = "here"  # the job of its schedules


class LocalSearch:
    """Calls `report(schedule, job, seq)` for each schedule that is better than all before it and than the one that
    runs, the cache's first. Its processes are nicer than the training."""

    def __init__(
        self, options: SolveOptions, cache: ScheduleCache | None, report: Callable[[Schedule, str, int], None]
    ) -> None:
        self._options, self._cache, self._report = options, cache, report
        self._seq = 0

    async def follow(self, problem: Problem, running: Schedule | None) -> None:
        """Searches until time is up or the best is proven; cancelling it ends the processes."""
        best_ms = NO_SCHEDULE_MS
        if running is not None:
            on_problem = Schedule(problem, running.programs, running.links, running.method)
            best_ms = (
                NO_SCHEDULE_MS
                if check(problem, on_problem)
                else self._value_ms(Result.from_schedule(on_problem, self._options))
            )
        arguments = self._options.arguments()
        try:
            begin = partial(improve, problem, warm_start=running, cache=self._cache, admit=_behind, **arguments)
            search = await asyncio.to_thread(begin)
            try:
                while result := await asyncio.to_thread(next, search, None):
                    last = result
                    if result.schedule is not None and self._value_ms(result) < best_ms:
                        best_ms = self._value_ms(result)
                        self._seq += 1
                        self._report(result.schedule, HERE, self._seq)
            finally:
                search.cancel()
        except OptPipeError as error:
            log.warning("there is no search for schedules: %s", error)
            return
        for note in last.notes:
            log.log(logging.INFO if note in last.reports else logging.WARNING, "the search for schedules: %s", note)
        if last.schedule is None:
            log.warning("the search for schedules ended as %s: %s", last.status, last.reason)
        else:
            log.info("the search for schedules has ended")

    def _value_ms(self, result: Result) -> float:
        """What the search minimizes."""
        return NO_SCHEDULE_MS if result.value_ms is None else result.value_ms


def _behind(pid: int) -> None:
    """Lets the solver compute where the training does not."""
    with suppress(OSError):  # it has ended
        os.setpriority(os.PRIO_PROCESS, pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICER))
