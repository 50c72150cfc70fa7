"""`TenantCaches`: which cache of solved schedules a tenant uses."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import structlog

from optpipe.errors import OptPipeError
from optpipe.results import Result
from optpipe_cache import Cache, Pack
from optpipe_cache.cache import KEPT
from optpipe_server.database import Database
from optpipe_server.database.cache_storage import TableStorage
from optpipe_server.database.retry import DATABASE_AWAY, first_line
from optpipe_server.settings import LOCAL, Settings

log = structlog.get_logger("optpipe.server")

ALL = ""  # the tenant of schedules that all tenants share


class TenantCaches:
    """The user's own cache file if the service has no keys, else rows of the database per tenant; then the pack."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings, self._database = settings, database
        self._pack = Pack(settings.pack) if settings.pack else None

    def cache_of(self, tenant: str) -> Cache:
        """Return the tenant's cache, with `shared_cache` that of all. Raises `InputError` if the file is unusable."""
        if tenant == LOCAL:
            return self._file
        owner = ALL if self._settings.shared_cache else tenant
        return Cache(TableStorage(self._database, owner), pack=self._pack)

    def keep(self, tenant: str, best: Result) -> None:
        """Keep the schedule of a job that is over, if it has one, verified where it came in.

        Where the cache or the database cannot be used, that is logged: the job has its answer all the same.
        """
        if best.schedule is None:
            return
        try:
            self.cache_of(tenant).add(
                best.schedule, best.found_status, best.lower_bound_ms, best.objective, verified=True
            )
        except (OptPipeError, *DATABASE_AWAY) as error:
            log.warning("a schedule was not cached", tenant=tenant, error=first_line(error))

    @cached_property
    def _file(self) -> Cache:
        return Cache(self._settings.cache, replace(KEPT, days=self._settings.kept.days), self._pack)
