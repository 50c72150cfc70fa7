"""`Solve`: the searches for one job, from its best schedule to its end.

Each search is a child process that `optpipe.improve` runs and whose schedules it verifies.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

import structlog

from optpipe.anytime import Search, search
from optpipe.errors import InputError
from optpipe.process import process_tree
from optpipe.process.niceness import NICER
from optpipe.results import Result, merged
from optpipe_server import metrics
from optpipe_server.database import Searches
from optpipe_server.database.refusals import CANCELLED
from optpipe_server.database.retry import DATABASE_AWAY, retry_while_away
from optpipe_server.database.searches import Claim, LostError, RequestedChanges
from optpipe_server.database.tables import Level, State
from optpipe_server.schedule_cache import ScheduleCache
from optpipe_server.settings import within
from optpipe_server.work.limits import memory_exceeded, solver_memory_mib

log = structlog.get_logger("optpipe.work")

FIRST_TO_GO = 500  # added to the kernel's score of whom to kill when memory is out
# A search that still runs so long after its time is ended with its process tree: its own time limit and the one of
# `improve` have failed.
LATE_S = 5.0
RISE = 1e-3  # a bound that rises by a smaller share is sent with the next schedule, or at the end

_NOT_RUNNING = float("inf")  # stands for a time when no search runs

Why = Literal["cancelled", "changed", "settled", "crashed", "late", "stopping", "lost"]
T = TypeVar("T")


@dataclass(frozen=True)
class SolveEnvironment:
    """What all solves of a process share."""

    searches: Searches
    cache: ScheduleCache
    memory_mib: int | None  # for each


class Solve:
    """A job that one thread works on, in `run`. Other threads end its search by `end`.

    Parameters
    ----------
    threads
        What its searches get.
    should_stop
        Tells that the job must be given back; asked often, by `watch`.
    """

    def __init__(
        self, environment: SolveEnvironment, claim: Claim, threads: int, should_stop: Callable[[], bool]
    ) -> None:
        self._environment, self._searches, self.threads = environment, environment.searches, threads
        self._should_stop, self._stopping = should_stop, threading.Event()
        self._lock = threading.Lock()  # guards the three fields below
        self._search: Search | None = None
        self._why: Why | None = None
        self._message = ""  # what was wrong, if that ended the search
        self._memory_mib: int | None = None  # the limit of the search
        self._given_back = False
        self._until = _NOT_RUNNING  # by the monotonic clock; a search that still runs then is late
        self._continue_from(claim)

    def _continue_from(self, claim: Claim) -> None:
        """Set the state in which the job goes on."""
        self._best = Result("unknown", objective=claim.options.objective, lower_bound_ms=claim.lower_bound_ms)
        if claim.best is not None and claim.best_version == claim.problem_version:
            self._best = merged(self._best, Result.from_schedule(claim.best, claim.options))
        self._sent_ms = claim.lower_bound_ms or 0.0  # the last bound that was committed without a schedule
        self._before_s, self._began = claim.spent_s, _NOT_RUNNING
        self._log = log.bind(job=claim.job_id, attempt=claim.attempt)
        with self._lock:
            if self._why in ("changed", "settled", "crashed", "late"):  # reasons that concern the former search only
                self._why, self._message = None, ""
            self.claim = claim

    @property
    def spent_s(self) -> float:
        """Seconds of the job's time limit that are spent."""
        return self._before_s + max(0.0, time.monotonic() - self._began)

    def end(self, why: Why, message: str = "", of: Search | Claim | None = None) -> None:
        """End the current search, or the next one if none runs. The first reason counts.

        With `of`, do so only if that search or claim is still the current one.
        """
        if why in ("stopping", "lost"):
            self._stopping.set()
        with self._lock:
            search = self._search
            if of is not None and of is not search and of is not self.claim:
                return
            if self._why is None or why == "lost":
                self._why, self._message = why, message
        if search is not None:
            search.cancel()
            process_tree.end(search.mark)

    def watch(self) -> None:
        """End the search if it must stop, is late or holds too much memory; called often."""
        if self._should_stop():
            self.end("stopping")
        search = self._search
        if search is None:
            return
        if time.monotonic() > self._until:
            self.end("late", of=search)
        elif message := memory_exceeded(search.mark, self._memory_mib):
            self.end("crashed", message, of=search)

    def send_bound(self, claim: Claim) -> None:
        """Commit the search's bound if it has risen since it was last sent; called often."""
        search = self._search
        if search is None or claim is not self.claim:
            return
        bound = search.best.lower_bound_ms
        if bound is None or bound <= self._sent_ms * (1 + RISE):
            return
        with suppress(LostError):  # which `apply_changes` will see
            if self._searches.raise_bound(claim, bound) and claim is self.claim:
                self._sent_ms = bound

    def apply_changes(self, claim: Claim, changes: RequestedChanges | None) -> None:
        """Do what the client has requested for this claim; None means that this worker has lost the job.

        More time does not end a search: the job goes on with it once the search has ended.
        """
        if changes is None:
            self.end("lost", of=claim)
        elif changes.cancelled:
            self.end("cancelled", of=claim)
        elif changes.problem_version != claim.problem_version:
            self.end("changed", of=claim)

    def run(self) -> bool:
        """Work until the job is over or another worker's; False if it waits again.

        A job that could not be given back, because the database is away or something failed, seems to run. It is taken
        again as that of a lost worker, but not without end.
        """
        try:
            while self._continues(self._search_once()):
                pass
        except LostError:
            self._log.warning("the job is another worker's, or was purged")
        except DATABASE_AWAY:
            self._log.warning("the job could not be given back")
            return False
        except Exception:
            self._log.exception("the solve failed")
            return False
        return not self._given_back

    def _search_once(self) -> Result:
        """Run one search and commit every better schedule as it comes; return its last result."""
        claim, last = self.claim, Result("unknown", objective=self.claim.options.objective)
        if claim.options.time_limit_s <= claim.spent_s or self._settles(self._best):
            return last
        self._log_limits(claim)
        noted = 0
        try:
            for last in self._begin(claim):
                for text in last.notes[noted:]:
                    if text != last.failure:
                        self._note(claim, text, "info" if text in last.reports else "warning")
                noted = len(last.notes)
                self._commit(claim, last)
        except InputError as error:  # for example an unknown method
            return replace(last, reason=str(error))
        except OSError as error:
            return replace(last, failure=f"the solver could not be started: {error.strerror or error}")
        finally:
            self._end_search()
        metrics.REJECTED.inc(last.rejected)
        if last.rejected:
            self._note(claim, f"rejected schedules and frames of the solver: {last.rejected}")
        return last

    def _begin(self, claim: Claim) -> Iterator[Result]:
        """Start a search whose process has its limits before it gets the request; none if there is a reason not to."""
        with self._lock:
            if self._why is not None:
                return iter(())
            remaining_s = claim.options.time_limit_s - claim.spent_s
            self._memory_mib = within(claim.options.memory_mib, self._environment.memory_mib)
            self._began = time.monotonic()
            self._until = self._began + remaining_s + LATE_S
            changed = {
                "time_limit_s": remaining_s,
                "threads": self.threads,
                "memory_mib": solver_memory_mib(self._memory_mib),
                "seed": (claim.options.seed + claim.attempt - 1 + claim.crashes) % 2**31,
            }
            asked = claim.options.model_copy(update=changed)
            self._search = search(claim.problem, asked, claim.best, admit=_yield_to_the_service)
            return self._search

    def _end_search(self) -> None:
        """Make sure that no process of the search is left."""
        self._before_s, self._began, self._until = self.spent_s, _NOT_RUNNING, _NOT_RUNNING
        with self._lock:
            search, self._search = self._search, None
        if search is not None:
            search.cancel()
            process_tree.end(search.mark)

    def _commit(self, claim: Claim, result: Result) -> None:
        """Commit the result if it is better, and end the search if the gap is reached."""
        before, self._best = self._best, merged(self._best, result)
        if self._best.schedule is not before.schedule:
            if self._retry(partial(self._searches.append, claim, self._best)):
                metrics.INCUMBENTS.inc()
                self._log.info("incumbent", method=self._best.method, value_ms=self._best.value_ms, gap=self._best.gap)
            else:
                self.end("changed")
        if self._settles(self._best):
            self.end("settled")

    def _note(self, claim: Claim, text: str, level: Level = "warning") -> None:
        self._retry(partial(self._searches.note, claim, text, level))

    def _settles(self, best: Result) -> bool:
        """Return whether the search is over: the schedule is proven, or its gap small enough."""
        options = self.claim.options
        if best.status == "optimal" and options.ends_when_proven:
            return True
        return options.gap > 0 and best.gap is not None and best.gap <= options.gap

    def _log_limits(self, claim: Claim) -> None:
        """Log what this worker does not have for the search."""
        asked, memory_mib = claim.options, self._environment.memory_mib
        if asked.threads is not None and asked.threads > self.threads:
            self._note(claim, f"threads = {asked.threads}: the search gets {self.threads} on this worker")
        if asked.memory_mib is not None and memory_mib is not None and asked.memory_mib > memory_mib:
            self._note(claim, f"memory_mib = {asked.memory_mib}: the search gets {memory_mib} on this worker")

    def _continues(self, last: Result) -> bool:
        """Decide what becomes of the job after a search; False if this worker is done with it."""
        with self._lock:
            why, message = self._why, self._message
        if why == "late":
            self._log.warning("a search was late and was ended")
        if why == "lost":
            raise LostError(self.claim.job_id)
        best = merged(self._best, last)
        if best.status != "infeasible" and not self._settles(best):
            if why == "cancelled":
                return self._finish("cancelled", replace(best, reason=CANCELLED))
            if why == "stopping":
                self._searches.give_back(self.claim, self.spent_s)
                self._log.info("given back")
                self._given_back = True
                return False
            failure = message if why == "crashed" else last.failure if why is None else None
            if failure is not None:
                self._log.warning("the solver failed", error=failure)
                if self._retry_after_crash(failure):
                    return True
                best = replace(best, reason=best.reason or failure)
        state: State = (
            "infeasible" if best.status == "infeasible" else "done" if best.schedule is not None else "failed"
        )
        return self._finish(state, best)

    def _retry_after_crash(self, failure: str) -> bool:
        metrics.CRASHES.inc()
        again = self._retry(partial(self._searches.reload, self.claim, self.spent_s, failure))
        if again is not None:
            self._continue_from(again)
        return again is not None

    def _finish(self, state: State, best: Result) -> bool:
        """End the job; True if it goes on because of another problem or more time."""
        self._environment.cache.keep(best)  # before it ends, so that whoever sees the end finds the schedule
        claim = self.claim
        if not self._retry(partial(self._searches.finish, claim, state, best, self.spent_s)):
            again = self._retry(partial(self._searches.reload, claim, self.spent_s))
            assert again is not None
            self._continue_from(again)
            return True
        self._log.info("ended", state=state, value_ms=best.value_ms, gap=best.gap, spent_s=round(self.spent_s, 3))
        metrics.SOLVES.labels(state).observe(self.spent_s)
        if best.gap is not None:
            metrics.GAP.observe(best.gap)
        return False

    def _retry(self, call: Callable[[], T]) -> T:
        return retry_while_away(call, self._stopping)


def _yield_to_the_service(pid: int) -> None:
    """Let the service's own requests go before a solver's process, and the kernel end it first if memory is out."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICER))
    with suppress(OSError), open(f"/proc/{pid}/oom_score_adj", "w") as file:
        file.write(str(FIRST_TO_GO))
