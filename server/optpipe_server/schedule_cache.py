"""The service's cache of solved schedules: the user's own file beside SQLite, else rows of the database that all
processes share; behind it the pack."""

from __future__ import annotations

from dataclasses import replace

import structlog

from optpipe.errors import OptPipeError
from optpipe.results import Result
from optpipe_cache import Cache, Pack
from optpipe_cache.cache import KEPT
from optpipe_server.database import Database
from optpipe_server.database.cache_storage import TableStorage
from optpipe_server.database.retry import DATABASE_AWAY, first_line
from optpipe_server.settings import Settings

log = structlog.get_logger("optpipe.server")


class ScheduleCache:
    """Opens the cache at each use, so that the service runs also while its file cannot be used."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings, self._database = settings, database
        self._pack = Pack(settings.pack) if settings.pack else None

    def open(self) -> Cache:
        """Return the cache. Raises `InputError` if its file is unusable."""
        storage = self._settings.cache if self._database.sqlite else TableStorage(self._database)
        return Cache(storage, replace(KEPT, days=self._settings.kept.days), self._pack)

    def keep(self, best: Result) -> None:
        """Keep the schedule of a job that is over, if it has one, verified where it came in.

        Where the cache or the database cannot be used, that is logged: the job has its answer all the same.
        """
        if best.schedule is None:
            return
        try:
            self.open().add(best.schedule, best.found_status, best.lower_bound_ms, best.objective, verified=True)
        except (OptPipeError, *DATABASE_AWAY) as error:
            log.warning("a schedule was not cached", error=first_line(error))
