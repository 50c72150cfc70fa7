"""Searches: each a child process (`optpipe.anytime`) that one thread follows, a few at a time, first come first served.

A job that must wait is not left with nothing: a short search gives it its first schedule, from which the long one starts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace

from optpipe.anytime import Result, Search, improve
from optpipe.errors import InputError, OptPipeError
from optpipe.schedule import Schedule
from optpipe_cache import Cache
from optpipe_server.settings import Settings
from optpipe_server.store import INTERRUPTED, NewJob, State, Store

log = logging.getLogger("optpipe.server")

SHORT_SEARCHES = 2  # at a time
PROVEN = 1e-9  # a gap that is rounding
_REASONS: dict[State, str] = {"cancelled": "the job was cancelled", "stopped": INTERRUPTED}


@dataclass
class Task:
    """A job that is not over."""

    job_id: str
    job: NewJob
    best: Result
    warm_start: Schedule | None
    lock: threading.Lock = field(default_factory=threading.Lock)  # over the four below
    search: Search | None = None
    started: bool = False
    cancelled: bool = False
    closing: bool = False

    def stop(self) -> None:
        if self.search:
            self.search.cancel()


class Solves:
    """The searches of one service. `tell(job_id)` is called, from any thread, after every change in the database."""

    def __init__(self, settings: Settings, store: Store, cache: Cache, tell: Callable[[str], None]) -> None:
        self._settings, self._store, self._cache, self._tell = settings, store, cache, tell
        self._long = ThreadPoolExecutor(settings.solves, "solve")
        self._short = ThreadPoolExecutor(SHORT_SEARCHES, "first")
        self._tasks: dict[str, Task] = {}
        self._lock = threading.Lock()  # over the tasks

    @property
    def open_jobs(self) -> int:
        """How many are searched or wait."""
        return len(self._tasks)

    def submit(self, job_id: str, job: NewJob, best: Result, warm_start: Schedule | None) -> None:
        """Starts or queues the search of a job that the database has as queued. `best` is what is known of it."""
        task = Task(job_id, job, best, warm_start)
        with self._lock:
            at_once = len(self._tasks) < self._settings.solves or best.schedule is not None
            self._tasks[job_id] = task
        if at_once:
            self._long.submit(self._run, task)
        else:
            self._short.submit(self._run_short, task)

    def cancel(self, job_id: str) -> None:
        """Ends the job with the best so far; nothing where it is over."""
        with self._lock:
            task = self._tasks.get(job_id)
        if task is None:
            return
        with task.lock:
            task.cancelled = True
            task.stop()
            waits = not task.started
        if waits:  # else its thread says how it ended
            self._end(task, "cancelled")

    def close(self) -> None:
        """Ends every search, with its process; what has not ended by itself is `stopped`."""
        with self._lock:
            tasks = list(self._tasks.values())
        for task in tasks:
            with task.lock:
                task.closing = True
                task.stop()
        self._short.shutdown(cancel_futures=True)
        self._long.shutdown(cancel_futures=True)
        for task in tasks:
            self._end(task, "stopped")

    def _run_short(self, task: Task) -> None:
        try:
            self._follow(task, first_only=True)
        except InputError:
            pass  # the long search says it
        except Exception:
            log.exception("job %s: the first schedule failed", task.job_id)
        self._long.submit(self._run, task)

    def _run(self, task: Task) -> None:
        with task.lock:
            if task.cancelled or task.closing:
                return
            task.started = True
        try:
            self._store.start(task.job_id)
            self._tell(task.job_id)
            self._follow(task)
            self._remember(task)
            self._end(task, _outcome(task))
        except InputError as error:  # such as a method that is none, or none for this problem
            task.best = replace(task.best, reason=str(error))
            self._end(task, "failed")
        except Exception as error:
            log.exception("job %s failed", task.job_id)
            task.best = replace(task.best, reason=f"the service failed: {type(error).__name__}")
            with suppress(Exception):  # the database may be what failed; the next start then marks the job
                self._end(task, "failed")

    def _follow(self, task: Task, first_only: bool = False) -> None:
        """Commits every better schedule of a search, as it comes."""
        with task.lock:
            if task.cancelled or task.closing:
                return
            task.search = search = improve(
                task.job.problem,
                method=task.job.method,
                time_limit=task.job.time_limit_s,
                threads=self._settings.threads_per_solve,
                objective=task.job.objective,
                warm_start=task.best.schedule or task.warm_start,
            )
        try:
            for result in search:
                before, task.best = task.best, merged(task.best, result)
                if task.best.schedule is not before.schedule and self._store.add_incumbent(task.job_id, task.best, "solver"):
                    self._tell(task.job_id)
                if first_only and task.best.schedule is not None:
                    break
        finally:
            search.cancel()
            for _ in search:  # to its end, where the process is reaped
                pass

    def _remember(self, task: Task) -> None:
        best = task.best
        if best.schedule is None:
            return
        try:
            self._cache.add(best.schedule, "optimal" if best.status == "optimal" else "feasible", best.lower_bound_ms, task.job.objective)
        except OptPipeError as error:
            log.warning("job %s: its schedule was not cached: %s", task.job_id, error)

    def _end(self, task: Task, state: State) -> None:
        with self._lock:
            self._tasks.pop(task.job_id, None)
        best = replace(task.best, reason=_REASONS.get(state, task.best.reason))
        self._store.finish(task.job_id, state, best)
        self._tell(task.job_id)


def merged(best: Result, new: Result) -> Result:
    """The better schedule of two results for one problem, with the better bound; the rest is the new one's."""
    value, other = best.objective_ms, new.objective_ms
    kept = best if other is None or (value is not None and value <= other) else new
    bound = max((b.lower_bound_ms for b in (best, new) if b.lower_bound_ms is not None), default=None)
    result = replace(new, schedule=kept.schedule, method=kept.method, lower_bound_ms=bound)
    if result.schedule is None:
        return result
    proven = result.gap is not None and result.gap <= PROVEN
    return replace(result, status="optimal" if proven else "feasible", reason=None)


def _outcome(task: Task) -> State:
    """How a search that has ended is called; one that had proven its answer was not cut short by a cancel that came as late."""
    if task.best.status == "infeasible":
        return "infeasible"
    if task.best.status != "optimal":
        if task.cancelled:
            return "cancelled"
        if task.closing:
            return "stopped"
    return "done" if task.best.schedule is not None else "failed"
