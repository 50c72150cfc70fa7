"""`Supervisor`: claims jobs as places are free, and follows one child process a solve. It is threads of one process."""

from __future__ import annotations

import os
import socket
import threading
import time

import structlog

from optpipe.process import family
from optpipe_server.caches import Caches
from optpipe_server.database import Database, Leases
from optpipe_server.database.leases import Claim
from optpipe_server.settings import Settings
from optpipe_server.work.cgroup import delegated
from optpipe_server.work.heartbeat import Heartbeat, Watch
from optpipe_server.work.patience import AWAY, said
from optpipe_server.work.solve import Crew, Solve
from optpipe_server.work.threads import Threads

log = structlog.get_logger("optpipe.work")

LOOK_S = 0.5  # between two looks for a job that waits, where nobody nudges
STOPPING_S = 5.0  # for the solves to hand their jobs back
HANGS_S = (
    60.0  # a thread that has not come round for so long; the database may take some ten seconds to say that it is away
)
AWAY_S = 5.0  # the database has not answered for so long


def own_name() -> str:
    """What this process is called where nobody gave it a name."""
    return f"{socket.gethostname()}-{os.getpid()}"[:128]


class Supervisor:
    """`settings.solves` places for jobs. Children end with `stop`, and with this process however it ends.

    `name` is what the database and the logs call this worker; no other process may have the same.
    """

    def __init__(self, settings: Settings, database: Database, caches: Caches, name: str) -> None:
        self._settings, self._name = settings, name
        self._leases = Leases(database, name, settings.lease_s)
        self._threads = Threads(settings.threads, settings.solves)
        self._solves: dict[Solve, threading.Thread] = {}
        self._lock = threading.Lock()  # over the solves
        self._news = threading.Event()  # a job may wait, or a place is free
        self._stopping = threading.Event()
        groups = delegated() if settings.memory_mib is not None else None
        self._crew = Crew(self._leases, caches, settings.memory_mib, groups, self._stopping)
        self._claims = threading.Thread(target=self._claim_all, name="claims", daemon=True)
        self._heartbeat = Heartbeat(self._leases, self.running, settings.heartbeat_s)
        self._watch = Watch(self.running)
        self._turned = self._reached = (
            time.monotonic()
        )  # when claims last came round, and when the database last answered them

    def start(self) -> None:
        if self._settings.solves:
            self._kill_on_exit = family.KillOnExit()
            for thread in (self._claims, self._heartbeat, self._watch):
                thread.start()

    def nudge(self) -> None:
        """A job waits: look now."""
        self._news.set()

    def running(self) -> list[Solve]:
        with self._lock:
            return list(self._solves)

    def held(self) -> list[str]:
        """The jobs whose leases are kept here, which are not abandoned though they may have run out: after a machine's
        sleep, all have."""
        return [claim.job_id for claim in self._heartbeat.held().values()]

    def health(self) -> dict[str, str | int]:
        """Whether its threads come round, whether they reach the database, and how many jobs they have."""
        now = time.monotonic()
        turns = min(self._turned, self._heartbeat.turned, self._watch.turned) > now - HANGS_S
        reached = max(self._reached, self._heartbeat.reached) > now - AWAY_S
        return {
            "status": "ok" if turns else "hangs",
            "database": "ok" if reached else "away",
            "solves": len(self._solves),
        }

    def stop(self) -> None:
        """Gives all jobs back, their children ended; where the database is away, their leases run out instead."""
        if not self._settings.solves:
            return
        until = time.monotonic() + STOPPING_S
        self._stopping.set()
        self._news.set()
        self._claims.join(STOPPING_S)
        with self._lock:
            solves = dict(self._solves)
        for solve in solves:
            solve.end("stopping")
        for thread in solves.values():
            thread.join(max(0.0, until - time.monotonic()))
        self._heartbeat.stop(max(0.0, until - time.monotonic()))
        self._watch.stop()
        self._kill_on_exit.cancel()

    def _claim_all(self) -> None:
        away = False
        while not self._stopping.is_set():
            self._turned = time.monotonic()
            self._news.clear()
            try:
                self._claim_some()
            except AWAY as error:
                if not away:
                    log.warning("no claims: the database is away", error=said(error))
                away = True
            except Exception:
                log.exception("a claim failed")
            else:
                away = False
            self._news.wait(LOOK_S)

    def _claim_some(self) -> None:
        """As many jobs as there are free places, or as wait."""
        while len(self._solves) < self._settings.solves and not self._stopping.is_set():
            claim = self._leases.claim()
            self._reached = time.monotonic()
            if claim is None:
                return
            self._solve(claim)

    def _solve(self, claim: Claim) -> None:
        threads = self._threads.take()
        solve = Solve(self._crew, claim, threads)

        def over() -> None:
            self._threads.give_back(threads)
            with self._lock:
                del self._solves[solve]

        def run() -> None:
            try:
                solve.run()
            finally:
                over()
                self._news.set()

        thread = threading.Thread(target=run, name=f"solve {claim.number}", daemon=True)
        log.info(
            "claimed",
            job=claim.job_id,
            attempt=claim.attempt,
            worker=self._name,
            threads=threads,
            spent_s=round(claim.spent_s, 3),
        )
        with self._lock:
            self._solves[solve] = thread
        try:
            thread.start()
        except RuntimeError:  # the system gives no more threads now
            over()
            self._leases.give_back(claim, claim.spent_s)
            raise
