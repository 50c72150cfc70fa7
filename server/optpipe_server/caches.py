"""`Caches`: whose solved schedules a tenant finds."""

from __future__ import annotations

from functools import cached_property

from optpipe_cache import Cache
from optpipe_server.database import Database
from optpipe_server.database.shelf import TableShelf
from optpipe_server.settings import LOCAL, Settings

ALL = ""  # the tenant of schedules that all tenants share


class Caches:
    """A cache per tenant: the user's own file for the one of a service without keys, rows of the database for any
    other."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings, self._database = settings, database

    def of(self, tenant: str) -> Cache:
        """The tenant's schedules, or with `shared_cache` those of all. Raises `InputError` where the user's file cannot
        be used."""
        if tenant == LOCAL:
            return self._file
        return Cache(TableShelf(self._database, ALL if self._settings.shared_cache else tenant))

    @cached_property
    def _file(self) -> Cache:
        return Cache(self._settings.cache)
