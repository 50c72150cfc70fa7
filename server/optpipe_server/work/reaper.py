"""`Reaper`: frees the jobs whose worker is gone, and deletes old ones. Several processes may run one at once."""

from __future__ import annotations

from collections.abc import Callable, Collection

import structlog

from optpipe_cache import Retention
from optpipe_cache.retention import KEEP_ALL
from optpipe_server import metrics
from optpipe_server.database import Database, prune, prune_schedules, reap
from optpipe_server.work.rounds import Rounds

log = structlog.get_logger("optpipe.work")

EVERY_S = 2.0


class Reaper(Rounds):
    """A thread that looks for expired leases every `every_s` seconds, except those of the jobs `held` by its own
    process. It deletes jobs that are over and schedules in the database where `kept` says so, the latter by days only.
    """

    def __init__(
        self,
        database: Database,
        held: Callable[[], Collection[str]] = tuple,
        every_s: float = EVERY_S,
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
