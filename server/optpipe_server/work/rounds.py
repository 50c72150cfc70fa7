"""Threads that do something again and again: `Heartbeat`, `Watchdog` and `Reaper`; what fails in a round is logged.

`Heartbeat` and `Watchdog` are two because the first waits for the database, which may be slow or away, and the second
never does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

import structlog

from optpipe_cache import Retention
from optpipe_cache.storage import KEEP_ALL
from optpipe_server import metrics
from optpipe_server.database import Database, Leases, prune, prune_schedules, reap
from optpipe_server.database.leases import Claim
from optpipe_server.database.retry import DATABASE_AWAY, first_line
from optpipe_server.work.solve import Solve

log = structlog.get_logger("optpipe.work")

STOPPING_S = 2.0
CHANGES_S = 0.5  # between two queries for the clients' requests
WATCH_S = 0.1
STUCK_S = 60.0  # a solve that has not ended its search so long after it was late loses its lease
REAP_S = 2.0

Running = Callable[[], Collection[Solve]]


class Rounds(threading.Thread):
    """A thread that calls `act` every `every_s` seconds, and at once after `nudge`, until it is stopped.

    `what` says in the log what cannot be done. That the database is away is logged once.
    """

    def __init__(self, name: str, what: str, every_s: float) -> None:
        super().__init__(name=name, daemon=True)
        self._what, self._every_s = what, every_s
        self._wake = threading.Event()
        self.stopping = threading.Event()
        self.last_round = time.monotonic()

    def act(self) -> None:
        """Do what is to be done in a round."""
        raise NotImplementedError

    def nudge(self) -> None:
        """Let the next round come now."""
        self._wake.set()

    def stop(self, timeout_s: float = STOPPING_S) -> None:
        """End the thread; do not wait long for a database that hangs."""
        self.stopping.set()
        self._wake.set()
        self.join(timeout_s)

    def run(self) -> None:
        away = False
        while not self.stopping.is_set():
            self.last_round = time.monotonic()
            self._wake.clear()
            try:
                self.act()
                away = False
            except DATABASE_AWAY as error:
                if not away:
                    log.warning(f"{self._what}: the database is away", error=first_line(error))
                away = True
            except Exception:
                log.exception(self._what)
            self._wake.wait(self._every_s)


class Heartbeat(Rounds):
    """Renews the leases of all running jobs every `every_s` seconds; reads the clients' requests, and tells bounds,
    more often."""

    def __init__(self, leases: Leases, running: Running, every_s: float) -> None:
        super().__init__("heartbeat", "leases cannot be renewed", min(CHANGES_S, every_s))
        self._leases, self._running, self._renew_s = leases, running, every_s
        self._renewed = 0.0  # monotonic clock
        self.last_answer = time.monotonic()

    def held(self) -> dict[Solve, Claim]:
        """Return the solves that are not stuck, with their claims: their leases are kept."""
        now = time.monotonic()
        return {solve: claim for solve in self._running() if (claim := solve.claim) and now < solve.until + STUCK_S}

    def act(self) -> None:
        began, held = time.monotonic(), self.held()
        if not held:
            return
        lost: set[str] = set()
        if began - self._renewed >= self._renew_s:
            lost = self._leases.renew([(claim, solve.spent_s) for solve, claim in held.items()])
            self._renewed = began
        changes = self._leases.requested_changes({claim.job_id: claim.attempt for claim in held.values()})
        self.last_answer = time.monotonic()
        for solve, claim in held.items():
            solve.apply_changes(claim, None if claim.job_id in lost else changes.get(claim.job_id))
        for solve, claim in held.items():
            try:
                solve.tell_bound(claim)
            except DATABASE_AWAY:
                raise
            except Exception:
                log.exception("a bound was not told")


class Watchdog(Rounds):
    """Ends searches that are late or hold too much memory."""

    def __init__(self, running: Running) -> None:
        super().__init__("watch", "a search cannot be watched", WATCH_S)
        self._running = running

    def act(self) -> None:
        for solve in self._running():
            try:
                solve.watch()
            except Exception:
                log.exception("a watch failed")


class Reaper(Rounds):
    """A thread that looks for expired leases every `every_s` seconds, except those of the jobs `held` by its own
    process. It deletes jobs that are over and schedules in the database where `kept` says so, the latter by days only.
    """

    def __init__(
        self,
        database: Database,
        held: Callable[[], Collection[str]] = tuple,
        every_s: float = REAP_S,
        kept: Retention = KEEP_ALL,
    ) -> None:
        super().__init__("reaper", "lost jobs cannot be looked for", every_s)
        self._database, self._held, self._kept = database, held, kept

    def act(self) -> None:
        self.reap()

    def reap(self, everything: bool = False) -> None:
        """Free the jobs of lost workers, or all running ones, for the process of a SQLite file that has just started;
        delete what is not kept."""
        for job_id in reap(self._database, everything, self._held()):
            metrics.REAPED.inc()
            log.warning("its worker is gone", job=job_id)
        if self._kept.limited and (old := prune(self._database, self._kept)):
            log.info("deleted jobs that were over", jobs=old, keep=self._kept.keep, days=self._kept.days)
        if self._kept.days is not None and (unused := prune_schedules(self._database, self._kept)):
            log.info("deleted schedules that were not used", schedules=unused, days=self._kept.days)
