"""`Supervisor`: claims jobs while it has free slots, and runs a `Solve` thread for each."""

from __future__ import annotations

import os
import socket
import threading
import time

import structlog

from optpipe.process import process_tree
from optpipe_server.database import Database, Leases
from optpipe_server.database.leases import Claim
from optpipe_server.schedule_cache import ScheduleCache
from optpipe_server.settings import Settings
from optpipe_server.work.limits import ThreadBudget
from optpipe_server.work.rounds import Heartbeat, Rounds, Watchdog
from optpipe_server.work.solve import Solve, SolveEnvironment

log = structlog.get_logger("optpipe.work")

LOOK_S = 0.5  # between two looks for a waiting job, unless `nudge` is called
STOPPING_S = 5.0  # for the solves to give their jobs back
# A thread that has made no round for so long hangs; the database may take ten seconds to report that it is away.
HANGS_S = 60.0
AWAY_S = 5.0  # the database counts as away if it has not answered for so long


def default_worker_name() -> str:
    """Return the name of this process as a worker, by host and process id."""
    return f"{socket.gethostname()}-{os.getpid()}"[:128]


class Supervisor(Rounds):
    """Solves up to `settings.solves` jobs at a time. Its children end with `stop`, and with this process however that
    ends.

    Parameters
    ----------
    name
        What the database and the logs call this worker. No other process may have the same name.
    """

    def __init__(self, settings: Settings, database: Database, cache: ScheduleCache, name: str) -> None:
        super().__init__("claims", "jobs cannot be claimed", LOOK_S)
        self._settings, self._worker = settings, name
        self._leases = Leases(database, name, settings.lease_s)
        self._threads = ThreadBudget(settings.threads, settings.solves)
        self._solves: dict[Solve, threading.Thread] = {}
        self._lock = threading.Lock()  # guards `_solves`
        self._environment = SolveEnvironment(self._leases, cache, settings.memory_mib, self.stopping)
        self._heartbeat = Heartbeat(self._leases, self.running, settings.heartbeat_s)
        self._watchdog = Watchdog(self.running)
        self._last_answer = time.monotonic()

    def start(self) -> None:
        if self._settings.solves:
            self._kill_on_exit = process_tree.KillOnExit()
            super().start()
            self._heartbeat.start()
            self._watchdog.start()

    def running(self) -> list[Solve]:
        with self._lock:
            return list(self._solves)

    def held(self) -> list[str]:
        """Return the ids of the jobs whose leases are kept here.

        They are not abandoned even if their leases have expired, as all have after the machine was suspended.
        """
        return [claim.job_id for claim in self._heartbeat.held().values()]

    def health(self) -> dict[str, str | int]:
        """Report whether the threads run, whether they reach the database, and how many jobs they have."""
        now = time.monotonic()
        running = min(self.last_round, self._heartbeat.last_round, self._watchdog.last_round) > now - HANGS_S
        reached = max(self._last_answer, self._heartbeat.last_answer) > now - AWAY_S
        return {
            "status": "ok" if running else "hangs",
            "database": "ok" if reached else "away",
            "solves": len(self._solves),
        }

    def stop(self, timeout_s: float = STOPPING_S) -> None:
        """End all children and give the jobs back; if the database is away, their leases expire instead."""
        if not self._settings.solves:
            return
        until = time.monotonic() + timeout_s
        super().stop(timeout_s)
        with self._lock:
            solves = dict(self._solves)
        for solve in solves:
            solve.end("stopping")
        for thread in solves.values():
            thread.join(max(0.0, until - time.monotonic()))
        self._heartbeat.stop(max(0.0, until - time.monotonic()))
        self._watchdog.stop()
        self._kill_on_exit.cancel()

    def act(self) -> None:
        """Claim as many jobs as there are free slots, or as wait."""
        while len(self._solves) < self._settings.solves and not self.stopping.is_set():
            claim = self._leases.claim()
            self._last_answer = time.monotonic()
            if claim is None:
                return
            self._solve(claim)

    def _solve(self, claim: Claim) -> None:
        threads = self._threads.take(claim.options.threads)
        solve = Solve(self._environment, claim, threads)

        def over() -> None:
            self._threads.give_back(threads)
            with self._lock:
                del self._solves[solve]

        def run() -> None:
            try:
                solve.run()
            finally:
                over()
                self.nudge()

        thread = threading.Thread(target=run, name=f"solve {claim.number}", daemon=True)
        job = {"job": claim.job_id, "attempt": claim.attempt, "worker": self._worker}
        log.info("claimed", **job, threads=threads, spent_s=round(claim.spent_s, 3))
        with self._lock:
            self._solves[solve] = thread
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads now
            over()
            self._leases.give_back(claim, claim.spent_s)
            raise
