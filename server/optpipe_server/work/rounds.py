"""`Rounds`: a thread that does something again and again; what fails in a round is logged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from optpipe_server.database.engine import DATABASE_AWAY, first_line

log = structlog.get_logger("optpipe.work")

STOPPING_S = 2.0


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
