"""`Solve`: one search for a job, a child process that `optpipe.anytime` runs and whose schedules it verifies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Concatenate, Literal, ParamSpec, TypeVar

import structlog

from optpipe.anytime import Search, search
from optpipe.errors import InputError
from optpipe.process import process_tree
from optpipe.results import Result, merged
from optpipe_server import metrics
from optpipe_server.database import Searches
from optpipe_server.database.changes import CANCELLED
from optpipe_server.database.engine import DATABASE_AWAY, first_line
from optpipe_server.database.searches import Claim, LostError
from optpipe_server.database.tables import Level, State
from optpipe_server.service_cache import ServiceCache

log = structlog.get_logger("optpipe.work")

MIB = 2**20
FIRST_TO_GO = 500  # added to the kernel's score of whom to kill when memory is out
# A search that still runs so long after its time is ended with its process tree: its own time limit and the one of
# `improve` have failed.
LATE_S = 5.0
SOLVER_SHARE = 7 / 8  # of the memory limit: the solver ends an engine before the whole search is ended
LEAST_MIB = 64
RETRY_S = 0.5  # between two attempts to write while the database is away
RISE = 1e-3  # a bound that rises by a smaller share is sent with the next schedule, or at the end

_NOT_RUNNING = float("inf")  # stands for a limit when no search runs

Why = Literal["cancelled", "settled", "crashed", "late", "stopping", "lost"]
P = ParamSpec("P")
T = TypeVar("T")


class Solve:
    """One search for a job, from its best schedule on, in the thread that calls `run`. Other threads end it by `end`.

    It gets `threads` and `most_mib`, or less memory if the job asks for less. `should_stop`, whether the job must be
    given back, is asked often, by `watch`.
    """

    def __init__(
        self,
        searches: Searches,
        cache: ServiceCache,
        claim: Claim,
        threads: int,
        most_mib: int | None,
        should_stop: Callable[[], bool],
    ) -> None:
        self._searches, self._cache, self.claim, self.threads = searches, cache, claim, threads
        self._should_stop, self._stopping = should_stop, threading.Event()
        self._lock = threading.Lock()  # guards the three fields below
        self._search: Search | None = None
        self._why: Why | None = None
        self._message = ""  # what was wrong, if that ended the search
        limits = [mib for mib in (claim.options.memory_mib, most_mib) if mib is not None]
        self._memory_mib = min(limits, default=None)  # None is no limit
        self._limit_s = _NOT_RUNNING  # of the search, from when its process was ready; one that runs on is late
        self._best = Result("unknown", objective=claim.options.objective, lower_bound_ms=claim.lower_bound_ms)
        if claim.best is not None and claim.best_version == claim.problem_version:
            self._best = merged(self._best, Result.from_schedule(claim.best, claim.options))
        self._sent_ms = claim.lower_bound_ms or 0.0  # the last bound that was committed without a schedule
        self._log = log.bind(job=claim.job_id, attempt=claim.attempt)

    @property
    def spent_s(self) -> float:
        """Seconds of the job's time limit that are spent: since the search's process was ready."""
        return self.claim.spent_s + (self._search.ran_s if self._search else 0.0)

    def end(self, why: Why, message: str = "") -> None:
        """End the search, also one that has not begun. The first reason counts, but a job that is lost is lost."""
        with self._lock:
            search = self._search
            if self._why is None or why == "lost":
                self._why, self._message = why, message
        if why in ("stopping", "lost"):
            self._stopping.set()
        if search is not None:
            search.cancel()
            process_tree.end(search.mark)

    def watch(self) -> None:
        """End the search if it must stop, is late or holds too much memory; called often."""
        search = self._search
        if self._should_stop():
            self.end("stopping")
        elif search is not None and search.ran_s > self._limit_s:
            self.end("late")
        elif search is not None and self._memory_mib is not None:
            # A limit on the address space would not do: CP-SAT reserves many times what it uses.
            held_mib = process_tree.resident_bytes(process_tree.members(search.mark)) / MIB
            if held_mib > self._memory_mib:
                message = f"the solver held {int(held_mib)} MiB, and memory_mib is {self._memory_mib}"
                self.end("crashed", message)

    def send_bound(self) -> None:
        """Commit the search's bound if it has risen since it was last sent; called often."""
        search = self._search
        bound = search.best.lower_bound_ms if search is not None else None
        if bound is not None and bound > self._sent_ms * (1 + RISE):
            with suppress(LostError):  # which the next look will show
                self._searches.raise_bound(self.claim, bound)
                self._sent_ms = bound

    def run(self) -> bool:
        """Search; False if the job waits again, with what it has.

        A job that could not be given back, because the database is away or something failed, seems to run. It is taken
        again as that of a lost worker, but not without end.
        """
        try:
            return self._conclude(self._run_search())
        except LostError:
            self._log.warning("the job is another worker's, has other costs, or was purged")
            return True
        except DATABASE_AWAY:
            self._log.warning("the job could not be given back")
        except Exception:
            self._log.exception("the solve failed")
        return False

    def _run_search(self) -> Result:
        """Commit every better schedule of the search as it comes; return its last result."""
        claim, last = self.claim, Result("unknown", objective=self.claim.options.objective)
        if claim.options.time_limit_s <= claim.spent_s or self._settles(self._best):
            return last
        limits = {
            "threads": (claim.options.threads, self.threads),
            "memory_mib": (claim.options.memory_mib, self._memory_mib),
        }
        for name, (asked, most) in limits.items():
            if asked is not None and most is not None and asked > most:
                self._note(f"{name} = {asked}: the search gets {most} on this worker")
        noted = 0
        try:
            for last in self._begin():
                for text in last.notes[noted:]:
                    if text != last.failure:
                        self._note(text, "info" if text in last.reports else "warning")
                noted = len(last.notes)
                self._commit(last)
        except InputError as error:  # for example an unknown method
            return replace(last, reason=str(error))
        except OSError as error:
            return replace(last, failure=f"the solver could not be started: {error.strerror or error}")
        finally:
            self._limit_s = _NOT_RUNNING
            if (search := self._search) is not None:  # none of its processes is left
                search.cancel()
                process_tree.end(search.mark)
        metrics.REJECTED.inc(last.rejected)
        if last.rejected:
            self._note(f"rejected schedules and frames of the solver: {last.rejected}")
        return last

    def _begin(self) -> Iterator[Result]:
        """Start a search whose process has its limits before it gets the request; none if there is a reason not to."""
        with self._lock:
            if self._why is not None:
                return iter(())
            options, remaining_s = self.claim.options, self.claim.options.time_limit_s - self.claim.spent_s
            self._limit_s = remaining_s + LATE_S
            memory_mib = self._memory_mib and max(LEAST_MIB, int(SOLVER_SHARE * self._memory_mib))
            changed = {
                "time_limit_s": remaining_s,
                "threads": self.threads,
                "memory_mib": memory_mib,
                "seed": (options.seed + self.claim.attempt - 1) % 2**31,
            }
            asked = options.model_copy(update=changed)
            self._search = search(self.claim.problem, asked, self.claim.best, admit=_first_to_go)
            return self._search

    def _commit(self, result: Result) -> None:
        """Commit the result if it is better, and end the search if the gap is reached."""
        before, self._best = self._best, merged(self._best, result)
        if self._best.schedule is not before.schedule:
            self._retry(self._searches.append, self._best)
            metrics.INCUMBENTS.inc()
            self._log.info("incumbent", method=self._best.method, value_ms=self._best.value_ms, gap=self._best.gap)
        if self._settles(self._best):
            self.end("settled")

    def _note(self, text: str, level: Level = "warning") -> None:
        self._retry(self._searches.note, text, level)

    def _settles(self, best: Result) -> bool:
        """Return whether the search is over: the schedule is proven, or its gap small enough."""
        options = self.claim.options
        if best.status == "optimal" and options.ends_when_proven:
            return True
        return options.gap > 0 and best.gap is not None and best.gap <= options.gap

    def _conclude(self, last: Result) -> bool:
        """End the job; False if it waits again."""
        why, best, spent_s = self._why, merged(self._best, last), self.spent_s
        if why == "late":
            self._log.warning("a search was late and was ended")
        if why == "lost":
            raise LostError(self.claim.job_id)
        state: State = "done" if best.schedule is not None else "failed"
        if best.status == "infeasible":
            state = "infeasible"
        if state != "infeasible" and not self._settles(best):
            if why == "stopping":
                self._searches.give_back(self.claim, spent_s)
                self._log.info("given back")
                return False
            if why == "cancelled":
                state, best = "cancelled", replace(best, reason=CANCELLED)
            failure = self._message if why == "crashed" else last.failure if why is None else None
            if failure is not None:
                self._log.warning("the solver failed", error=failure)
                metrics.CRASHES.inc()
                if self._retry(self._searches.give_back, spent_s, failure):
                    return False
                best = replace(best, reason=best.reason or failure)
        self._cache.keep(best)  # before it ends, so that whoever sees the end finds the schedule
        if not self._retry(self._searches.finish, state, best, spent_s):
            return False
        self._log.info("ended", state=state, value_ms=best.value_ms, gap=best.gap, spent_s=round(spent_s, 3))
        metrics.SOLVES.labels(state).observe(spent_s)
        if best.gap is not None:
            metrics.GAP.observe(best.gap)
        return True

    def _retry(self, write: Callable[Concatenate[Claim, P], T], *arguments: P.args, **named: P.kwargs) -> T:
        """Write until the database answers. Once the search has to stop, raises the error.

        A write that failed may have been committed all the same, so `write` must be safe to repeat.
        """
        is_away = False
        while True:
            try:
                result = write(self.claim, *arguments, **named)
            except DATABASE_AWAY as error:
                if self._stopping.is_set():
                    raise
                if not is_away:
                    log.warning("the database is away", error=first_line(error))
                is_away = True
                self._stopping.wait(RETRY_S)
            else:
                if is_away:
                    log.info("the database is back")
                return result


def _first_to_go(pid: int) -> None:
    """Let the kernel end a solver's process before the service's own ones if memory is out."""
    with suppress(OSError), open(f"/proc/{pid}/oom_score_adj", "w") as file:
        file.write(str(FIRST_TO_GO))
