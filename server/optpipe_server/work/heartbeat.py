"""Two threads beside those that solve: one keeps the leases and hears what clients want, one watches clocks and memory.

They are two because the first one waits for the database, which may take its time or be away, and the second one never
does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

import structlog

from optpipe_server.database import Leases
from optpipe_server.database.leases import Claim
from optpipe_server.work.patience import AWAY, said
from optpipe_server.work.solve import Solve

log = structlog.get_logger("optpipe.work")

ORDERS_S = 0.5  # between two looks at what clients want
WATCH_S = 0.1
HUNG_S = 60.0  # a solve that has not ended its search so long after it was late is let go

Running = Callable[[], Collection[Solve]]


class Heartbeat(threading.Thread):
    """Renews the leases of all that runs every `every_s` seconds, and passes on the orders more often."""

    def __init__(self, leases: Leases, running: Running, every_s: float) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._leases, self._running, self._every_s = leases, running, every_s
        self._stopping = threading.Event()
        self._beat = 0.0  # monotonic clock: the last one
        self.turned = self.reached = time.monotonic()  # when it last came round, and when the database last answered

    def stop(self, timeout_s: float) -> None:
        self._stopping.set()
        self.join(timeout_s)

    def run(self) -> None:
        away = False
        while not self._stopping.wait(min(ORDERS_S, self._every_s)):
            self.turned = time.monotonic()
            try:
                self._look()
            except AWAY as error:
                if not away:
                    log.warning("no heartbeat: the database is away", error=said(error))
                away = True
            except Exception:
                log.exception("a heartbeat failed")
            else:
                away = False

    def held(self) -> dict[Solve, Claim]:
        """What runs and does not hang: whose leases are kept."""
        now = time.monotonic()
        return {solve: claim for solve in self._running() if (claim := solve.claim) and now < solve.until + HUNG_S}

    def _look(self) -> None:
        began, held = time.monotonic(), self.held()
        if not held:
            return
        lost: set[str] = set()
        if began - self._beat >= self._every_s:
            lost = self._leases.beat([(claim, solve.spent_s) for solve, claim in held.items()])
            self._beat = began
        orders = self._leases.orders({claim.job_id: claim.attempt for claim in held.values()})
        self.reached = time.monotonic()
        for solve, claim in held.items():
            solve.hear(claim, None if claim.job_id in lost else orders.get(claim.job_id))


class Watch(threading.Thread):
    """Ends searches that are late or hold too much memory."""

    def __init__(self, running: Running) -> None:
        super().__init__(name="watch", daemon=True)
        self._running = running
        self._stopping = threading.Event()
        self.turned = time.monotonic()

    def stop(self) -> None:
        self._stopping.set()
        self.join()

    def run(self) -> None:
        while not self._stopping.wait(WATCH_S):
            self.turned = time.monotonic()
            for solve in self._running():
                try:
                    solve.watch()
                except Exception:
                    log.exception("a watch failed")
