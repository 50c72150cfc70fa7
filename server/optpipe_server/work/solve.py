"""One solve: the searches for one claimed job, from its best schedule to its end. Each is a child process
(`optpipe.improve`)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import structlog

from optpipe.anytime import Result, Search, improve, merged
from optpipe.errors import InputError, OptPipeError
from optpipe.process import family
from optpipe.process.niceness import NICER
from optpipe.schedule import Found
from optpipe_server import metrics
from optpipe_server.caches import Caches
from optpipe_server.database import Leases
from optpipe_server.database.jobs import CANCELLED
from optpipe_server.database.leases import Claim, LostError, Orders
from optpipe_server.database.tables import State
from optpipe_server.work.patience import AWAY, patiently
from optpipe_server.work.room import Anything, Room, room, told_mib

log = structlog.get_logger("optpipe.work")

FIRST_TO_GO = 500  # added to what the kernel holds against a process when memory is out
# a search that still runs so long after its time is ended with all its family: its own clock and `improve`'s have
# failed
LATE_S = 5.0

_NOT_RUNNING = float("inf")  # when a search began, or is to be over

Why = Literal["cancelled", "changed", "settled", "crashed", "late", "stopping", "lost"]  # a search was ended
T = TypeVar("T")


@dataclass(frozen=True)
class Crew:
    """What all solves of a supervisor share."""

    leases: Leases
    caches: Caches
    memory_mib: int | None  # of each
    groups: Path | None  # where the kernel keeps them within it (`cgroup`)
    stopping: threading.Event


class Solve:
    """A claimed job in the hands of one thread, which runs `run`. Others tell it by `end`, from any thread."""

    def __init__(self, crew: Crew, claim: Claim, threads: int) -> None:
        self._crew, self._leases, self._threads = crew, crew.leases, threads
        self._lock = threading.Lock()  # over the three below
        self._search: Search | None = None
        self._why: Why | None = None
        self._told = ""  # what was wrong, where a search was ended because something was
        self._room: Room = Anything()
        self.until = _NOT_RUNNING  # monotonic clock: a search that still runs then is late
        self.claim: Claim | None  # None while the attempt changes, so that nobody takes the old one for lost
        self._take(claim)

    def _take(self, claim: Claim) -> None:
        """Where the job goes on."""
        self._best = Result("unknown", objective=claim.objective, lower_bound_ms=claim.lower_bound_ms)
        if claim.best is not None and claim.best_version == claim.problem_version:
            self._best = merged(self._best, replace(self._best, schedule=claim.best, method=claim.best.method))
        self._before_s, self._began = claim.spent_s, _NOT_RUNNING
        self._log = log.bind(job=claim.job_id, attempt=claim.attempt)
        with self._lock:
            if self._why in ("changed", "settled", "crashed", "late"):  # which says nothing of what comes now
                self._why, self._told = None, ""
            self.claim = self._held = claim

    @property
    def spent_s(self) -> float:
        """Of the job's time."""
        return self._before_s + max(0.0, time.monotonic() - self._began)

    def end(self, why: Why, told: str = "", of: Search | Claim | None = None) -> None:
        """Ends the search that runs, or would be next, unless it is none `of` that search or claim; the first reason
        counts."""
        with self._lock:
            search = self._search
            if of is not None and of is not search and of is not self.claim:
                return
            if self._why is None or why == "lost":
                self._why, self._told = why, told
        if search is not None:
            search.cancel()
            family.end(search.family)

    def watch(self) -> None:
        """Ends a search that is late or holds too much; called often."""
        search = self._search
        if search is None:
            return
        if time.monotonic() > self.until:
            self.end("late", of=search)
        elif told := self._room.exceeded(search.family):
            self.end("crashed", told, of=search)

    def hear(self, claim: Claim, orders: Orders | None) -> None:
        """What the client wants of the claim, as it was asked for; None where that is another worker's.

        More time is no reason to end a search: it goes on when it has ended.
        """
        if orders is None:
            self.end("lost", of=claim)
        elif orders.cancelled:
            self.end("cancelled", of=claim)
        elif orders.problem_version != claim.problem_version:
            self.end("changed", of=claim)

    def run(self) -> None:
        """Until the job is over, another's, or given back."""
        try:
            while self._goes_on(self._searched()):
                pass
        except LostError:
            metrics.LOST.inc()
            self._log.warning("the job is another's, or purged")
        except AWAY:  # while stopping: the lease runs out, and the job waits again
            self._log.warning("the job could not be given back")
        except Exception:  # the lease runs out, too: another attempt may have more luck, and some later one is the last
            self._log.exception("the solve failed")

    def _searched(self) -> Result:
        """The end of one search from where the job is; every better schedule is committed as it comes."""
        claim, last = self._held, Result("unknown", objective=self._held.objective)
        if claim.time_limit_s <= claim.spent_s or self._settled():
            return last
        noted = 0
        try:
            for last in self._begin(claim):
                for text in last.notes[noted:]:
                    if text != last.failure:
                        self._note(claim, text)
                noted = len(last.notes)
                self._keep(claim, last)
        except InputError as error:  # such as a method that is none, or none for this problem
            return replace(last, reason=str(error))
        except OSError as error:
            return replace(last, failure=f"the solver could not be started: {error.strerror or error}")
        finally:
            self._after()
        metrics.REJECTED.inc(last.rejected)
        if last.rejected:
            self._note(claim, f"rejected, of what the solver wrote: {last.rejected}")
        return last

    def _begin(self, claim: Claim) -> Iterator[Result]:
        """A search in a process that has its limits before it is asked; none where there is a reason not to."""
        with self._lock:
            if self._why is not None or self._crew.stopping.is_set():
                return iter(())
            remaining_s = claim.time_limit_s - claim.spent_s
            self._room = room(self._crew.memory_mib, self._crew.groups)
            self._began = time.monotonic()
            self.until = self._began + remaining_s + LATE_S
            self._search = improve(
                claim.problem,
                method=claim.method,
                time_limit=remaining_s,
                threads=self._threads,
                objective=claim.objective,
                warm_start=claim.best,
                seed=claim.attempt - 1,
                memory_mib=told_mib(self._crew.memory_mib),
                gap=claim.gap,
                admit=self._admit,
            )
            return self._search

    def _admit(self, pid: int) -> None:
        """The solver's process before it is asked: requests go before it, and if the machine's memory is out, it is the
        one to end."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICER))
        with suppress(OSError), open(f"/proc/{pid}/oom_score_adj", "w") as file:
            file.write(str(FIRST_TO_GO))
        self._room.admit(pid)

    def _after(self) -> None:
        """No process of the search is left."""
        self._before_s, self._began, self.until = self.spent_s, _NOT_RUNNING, _NOT_RUNNING
        with self._lock:
            search, self._search = self._search, None
        if search is not None:
            search.cancel()
            family.end(search.family)
        room, self._room = self._room, Anything()
        if told := room.close():
            self.end("crashed", told)

    def _keep(self, claim: Claim, result: Result) -> None:
        """Commits the result if it is better, and ends the search if nothing is left to search for."""
        before, self._best = self._best, merged(self._best, result)
        if self._best.schedule is not before.schedule:
            if self._patiently(partial(self._leases.append, claim, self._best)):
                metrics.INCUMBENTS.inc()
                self._log.info(
                    "incumbent", method=self._best.method, value_ms=self._best.objective_ms, gap=self._best.gap
                )
            else:
                self.end("changed")
        if self._settled():
            self.end("settled")

    def _note(self, claim: Claim, text: str) -> None:
        self._patiently(partial(self._leases.note, claim, text, "warning"))

    def _settled(self) -> bool:
        """Whether nothing is left to search for."""
        gap = self._best.gap
        return gap is not None and gap <= self._held.gap

    def _goes_on(self, last: Result) -> bool:
        """What becomes of the job after a search; False where it is no more this worker's."""
        with self._lock:
            why, told = self._why, self._told
        if why == "late":
            self._log.warning("a search that did not end was ended")
        if why == "lost":
            raise LostError(self._held.job_id)
        best = merged(self._best, last)
        if best.status not in ("optimal", "infeasible") and not self._settled():
            if why == "cancelled":
                return self._finish("cancelled", replace(best, reason=CANCELLED))
            if self._crew.stopping.is_set():
                self._leases.give_back(self._held, self.spent_s)
                self._log.info("given back")
                return False
            failure = told if why == "crashed" else last.failure if why is None else None
            if failure is not None:
                self._log.warning("the solver failed", error=failure)
                if self._once_more(failure):
                    return True
                best = replace(best, reason=best.reason or failure)
        state: State = (
            "infeasible" if best.status == "infeasible" else "done" if best.schedule is not None else "failed"
        )
        return self._finish(state, best)

    def _once_more(self, failure: str) -> bool:
        metrics.CRASHES.inc()
        held, self.claim = self._held, None
        again = self._patiently(partial(self._leases.crashed, held, failure, self.spent_s))
        if again is None:
            self.claim = held
            return False
        self._take(again)
        return True

    def _finish(self, state: State, best: Result) -> bool:
        """The job's end; True where it goes on because of another problem or more time."""
        claim = self._held
        if not self._patiently(partial(self._leases.finish, claim, state, best, self.spent_s)):
            self._take(self._patiently(partial(self._leases.again, claim, self.spent_s)))
            return True
        self._log.info("ended", state=state, value_ms=best.objective_ms, gap=best.gap, spent_s=round(self.spent_s, 3))
        metrics.SOLVES.labels(state).observe(self.spent_s)
        if best.gap is not None:
            metrics.GAP.observe(best.gap)
        self._remember(claim, best)
        return False

    def _remember(self, claim: Claim, best: Result) -> None:
        if best.schedule is None:
            return
        try:
            status: Found = "optimal" if best.status == "optimal" else "feasible"
            self._crew.caches.of(claim.tenant).add(best.schedule, status, best.lower_bound_ms, claim.objective)
        except (OptPipeError, *AWAY) as error:
            self._log.warning("its schedule was not cached", error=str(error))

    def _patiently(self, call: Callable[[], T]) -> T:
        return patiently(call, self._crew.stopping)
