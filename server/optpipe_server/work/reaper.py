"""`Reaper`: finds the jobs whose worker is gone. Any process may run one, and any number of them at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

import structlog

from optpipe_server import metrics
from optpipe_server.database import Database, reap
from optpipe_server.work.patience import AWAY, said

log = structlog.get_logger("optpipe.work")

EVERY_S = 2.0
STOPPING_S = 2.0


class Reaper:
    """A thread that looks every `every_s` seconds, whoever else works or hangs in its process, for all but the jobs
    that are `held` there.

    In the one process of a SQLite file it is started before the supervisor: whatever runs then is a process's that has
    ended.
    """

    def __init__(
        self, database: Database, held: Callable[[], Collection[str]] = tuple, every_s: float = EVERY_S
    ) -> None:
        self._database, self._held, self._every_s = database, held, every_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reaper", daemon=True)

    def start(self) -> None:
        if self._database.sqlite:
            self._reap(everything=True)
        self._thread.start()

    def stop(self) -> None:
        """Does not wait for a database that hangs."""
        self._stopping.set()
        self._thread.join(STOPPING_S)

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            try:
                self._reap()
            except Exception:
                log.exception("a look for lost jobs failed")

    def _reap(self, everything: bool = False) -> None:
        try:
            for job_id in reap(self._database, everything, self._held()):
                metrics.REAPED.inc()
                log.warning("its worker is gone", job=job_id)
        except AWAY as error:
            log.warning("the database is away", error=said(error))
