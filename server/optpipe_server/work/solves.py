"""`Solves`: the jobs that this process solves, whichever queue they come from; `EmbeddedWorker` takes them from the
table of jobs."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import structlog

from optpipe.process import process_tree
from optpipe_server.database import Database, Searches
from optpipe_server.database.engine import DATABASE_AWAY, first_line
from optpipe_server.service_cache import ServiceCache
from optpipe_server.settings import Settings
from optpipe_server.work.solve import Solve

log = structlog.get_logger("optpipe.work")

CHANGES_S = 0.5  # between two queries for the clients' requests
WATCH_S = 0.1
SPENT_S = 5.0  # between two times that the seconds spent are stored
# A thread that has made no round for so long hangs; the database may take ten seconds to report that it is away.
HANGS_S = 60.0
AWAY_S = 5.0  # the database counts as away if it has not answered for so long
LOOK_S = 0.5  # between two looks for a job that waits, unless `nudge` is called
STOPPING_S = 2.0  # for a round to end


def default_worker_name() -> str:
    """Return the name of this process as a worker, by host and process id."""
    return f"{socket.gethostname()}-{os.getpid()}"[:128]


class Rounds(threading.Thread):
    """Calls `act` every `every_s` seconds, and at once after `nudge`, from `start` until `stop`.

    `what` says in the log what cannot be done. That the database is away is logged once.
    """

    def __init__(self, name: str, what: str, every_s: float, act: Callable[[], object]) -> None:
        super().__init__(name=name, daemon=True)
        self._what, self._every_s, self._act = what, every_s, act
        self._wake = threading.Event()
        self.stopping = threading.Event()
        self.last_round = time.monotonic()

    def nudge(self) -> None:
        """Let the next round come now."""
        self._wake.set()

    def stop(self, timeout_s: float = STOPPING_S) -> None:
        """End the thread; do not wait long for a database that hangs."""
        self.stopping.set()
        self._wake.set()
        if self.is_alive():
            self.join(max(0.0, timeout_s))

    def run(self) -> None:
        away = False
        while not self.stopping.is_set():
            self.last_round = time.monotonic()
            self._wake.clear()
            try:
                self._act()
                away = False
            except DATABASE_AWAY as error:
                if not away:
                    log.warning(f"{self._what}: the database is away", error=first_line(error))
                away = True
            except Exception:
                log.exception(self._what)
            self._wake.wait(self._every_s)


class Solves:
    """Runs a `Solve` for each job, and watches them, by the name that the database and the logs have for this worker.
    Its children end with `stop`, and with this process however that ends.

    One thread waits for the database, which may be slow or away; another one, which ends searches that are late or too
    large, never does.
    """

    def __init__(self, settings: Settings, database: Database, cache: ServiceCache, name: str) -> None:
        self.most, self.name = settings.solves, name
        self.searches = Searches(database, name)
        self._threads = settings.threads_each
        self._cache, self._memory_mib = cache, settings.memory_mib
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
        threads = min(self._threads, claim.options.threads or self._threads)
        solve = Solve(self.searches, self._cache, claim, threads, self._memory_mib, should_stop)
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


class EmbeddedWorker:
    """The worker of a service that is one process. It solves up to `solves.most` jobs at a time: the highest priority
    first, then the oldest. Jobs that ran when the former process ended are among them."""

    def __init__(self, solves: Solves) -> None:
        self.solves = solves
        self._claims = Rounds("claims", "jobs cannot be claimed", LOOK_S, self._claim)
        self.nudge = self._claims.nudge

    def start(self) -> None:
        self.solves.start()
        self._claims.start()

    def stop(self, timeout_s: float) -> None:
        """End all searches and give the jobs back. No process of theirs is left, whatever the database does."""
        until = time.monotonic() + timeout_s
        self._claims.stop(timeout_s)
        self.solves.stop(until)

    def _claim(self) -> None:
        while len(running := self.solves.running()) < self.solves.most and not self._claims.stopping.is_set():
            job_id = self.solves.searches.first_open([solve.claim.job_id for solve in running])
            if job_id is None:
                return
            solve = self.solves.begin(job_id, self._claims.stopping.is_set)
            if solve is None:
                continue
            try:
                threading.Thread(target=self._run, args=(solve,), name=f"solve {job_id}", daemon=True).start()
            except RuntimeError:  # the system has no more threads now
                solve.end("stopping")
                self.solves.run(solve)
                raise

    def _run(self, solve: Solve) -> None:
        try:
            self.solves.run(solve)
        finally:
            self.nudge()
