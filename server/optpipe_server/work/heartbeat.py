"""Two threads beside those that solve.

`Heartbeat` renews the leases, reads what clients have requested, and tells bounds that have risen. `Watchdog` ends
searches that are late or hold too much memory. They are two because the first waits for the database, which may be slow
or away, and the second never does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import structlog

from optpipe_server.database import Leases
from optpipe_server.database.leases import Claim
from optpipe_server.database.retry import DATABASE_AWAY
from optpipe_server.work.rounds import Rounds
from optpipe_server.work.solve import Solve

log = structlog.get_logger("optpipe.work")

CHANGES_S = 0.5  # between two queries for the clients' requests
WATCH_S = 0.1
STUCK_S = 60.0  # a solve that has not ended its search so long after it was late loses its lease

Running = Callable[[], Collection[Solve]]


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
