"""`Solves`: the jobs that this process solves, whichever queue they come from."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import structlog

from optpipe.process import process_tree
from optpipe_server.database import Database, Searches
from optpipe_server.schedule_cache import ScheduleCache
from optpipe_server.settings import Settings
from optpipe_server.work.limits import ThreadBudget
from optpipe_server.work.rounds import Rounds
from optpipe_server.work.solve import Solve, SolveEnvironment

log = structlog.get_logger("optpipe.work")

CHANGES_S = 0.5  # between two queries for the clients' requests
WATCH_S = 0.1
SPENT_S = 5.0  # between two times that the seconds spent are stored
# A thread that has made no round for so long hangs; the database may take ten seconds to report that it is away.
HANGS_S = 60.0
AWAY_S = 5.0  # the database counts as away if it has not answered for so long


def default_worker_name() -> str:
    """Return the name of this process as a worker, by host and process id."""
    return f"{socket.gethostname()}-{os.getpid()}"[:128]


class Solves:
    """Runs a `Solve` for each job that it is given, and watches them. Its children end with `stop`, and with this
    process however that ends.

    One thread waits for the database, which may be slow or away; another one, which ends searches that are late or too
    large, never does.

    Parameters
    ----------
    name
        What the database and the logs call this worker.
    """

    def __init__(self, settings: Settings, database: Database, cache: ScheduleCache, name: str) -> None:
        self.most, self.name = settings.solves, name
        self.searches = Searches(database, name)
        self._threads = ThreadBudget(settings.threads, settings.solves)
        self._environment = SolveEnvironment(self.searches, cache, settings.memory_mib)
        self._lock = threading.Lock()
        self._running: list[Solve] = []
        self._changes = Rounds("changes", "requests of clients cannot be read", CHANGES_S, self._apply_changes)
        self._watchdog = Rounds("watch", "a search cannot be watched", WATCH_S, self._watch)
        self._stored = self._last_answer = time.monotonic()

    def start(self) -> None:
        self._kill_on_exit = process_tree.KillOnExit()
        self._changes.start()
        self._watchdog.start()

    def running(self) -> list[Solve]:
        with self._lock:
            return list(self._running)

    def begin(self, job_id: str, should_stop: Callable[[], bool]) -> Solve | None:
        """Take a job; None if there is nothing to solve any more. As soon as `should_stop`, it is given back."""
        claim = self.searches.begin(job_id)
        if claim is None:
            return None
        solve = Solve(self._environment, claim, self._threads.take(claim.options.threads), should_stop)
        job = {"job": job_id, "attempt": claim.attempt, "worker": self.name}
        log.info("claimed", **job, threads=solve.threads, spent_s=round(claim.spent_s, 3))
        with self._lock:
            self._running.append(solve)
        return solve

    def run(self, solve: Solve) -> bool:
        """Work on a job that was begun; False if it waits again."""
        try:
            return solve.run()
        finally:
            self._threads.give_back(solve.threads)
            with self._lock:
                self._running.remove(solve)

    def health(self) -> dict[str, str | int]:
        """Report whether the threads run, whether they reach the database, and how many jobs they have."""
        now = time.monotonic()
        rounds = min(self._changes.last_round, self._watchdog.last_round) > now - HANGS_S
        return {
            "status": "ok" if rounds else "hangs",
            "database": "ok" if self._last_answer > now - AWAY_S else "away",
            "solves": len(self.running()),
        }

    def stop(self, until: float) -> None:
        """End all searches, wait for their threads until that time, and end what is left of their processes.

        Jobs that a database which is away does not take back seem to run until they are taken again.
        """
        for solve in self.running():
            solve.end("stopping")
        while self.running() and time.monotonic() < until:
            time.sleep(0.02)
        self._changes.stop(until - time.monotonic())
        self._watchdog.stop()
        self._kill_on_exit.cancel()

    def _apply_changes(self) -> None:
        began, running = time.monotonic(), self.running()
        cancelled = self.searches.cancel_requests([solve.claim for solve in running])
        self._last_answer = time.monotonic()
        for solve in running:
            request = cancelled.get(solve.claim.job_id)
            if request is None:
                solve.end("lost")
            elif request:
                solve.end("cancelled")
        if began - self._stored >= SPENT_S:
            self._stored = began
            for solve in running:
                self.searches.store_spent(solve.claim, solve.spent_s)
        for solve in running:
            solve.send_bound()

    def _watch(self) -> None:
        for solve in self.running():
            solve.watch()
