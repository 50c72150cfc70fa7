"""The service's cache of solved schedules: the user's own file beside SQLite, else rows of the database that all
processes share; behind it the pack."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace

import structlog
from sqlalchemy import delete, insert, or_, select, tuple_, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from optpipe.errors import OptPipeError
from optpipe.results import Result
from optpipe_cache import Cache, Pack, Retention, StoredRow
from optpipe_cache.cache import KEPT
from optpipe_server.database import Database
from optpipe_server.database.engine import DATABASE_AWAY, first_line
from optpipe_server.database.tables import schedules
from optpipe_server.settings import Settings

log = structlog.get_logger("optpipe.server")

_LAST_USED = schedules.c.used.desc(), schedules.c.problem_sha256


class ServiceCache:
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


class TableStorage:
    """An `optpipe_cache.Storage` for all processes that share the database. Raises `SQLAlchemyError`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def entry(self, problem_sha256: str, objective: str) -> str | None:
        row = select(schedules.c.entry).filter_by(problem_sha256=problem_sha256, objective=objective)
        with self._database.read() as db:
            return db.execute(row).scalar_one_or_none()

    def similar(self, structure: str, objective: str, most: int) -> Sequence[tuple[str, bytes]]:
        rows = select(schedules.c.problem_sha256, schedules.c.features)
        near = rows.filter_by(structure=structure, objective=objective).order_by(*_LAST_USED).limit(most)
        return [(row.problem_sha256, row.features) for row in self._database.rows(near)]

    def entries(self) -> Sequence[tuple[str, int]]:
        rows = select(schedules.c.entry, schedules.c.hits).order_by(*_LAST_USED)
        return [(row.entry, row.hits) for row in self._database.rows(rows)]

    def swap(self, row: StoredRow, stored: str | None) -> bool:
        if stored is None:
            try:
                with self._database.write() as db:
                    db.execute(insert(schedules).values(**asdict(row)))
            except IntegrityError:  # another process was first
                return False
            return True
        columns = {name: value for name, value in asdict(row).items() if name != "hits"}
        same = update(schedules).filter_by(problem_sha256=row.problem_sha256, objective=row.objective, entry=stored)
        with self._database.write() as db:
            return db.execute(same.values(**columns)).rowcount == 1

    def found(self, problem_sha256: str, objective: str, used: str) -> None:
        row = update(schedules).filter_by(problem_sha256=problem_sha256, objective=objective)
        with suppress(SQLAlchemyError), self._database.write() as db:  # an answer that was read is an answer
            db.execute(row.values(used=used, hits=schedules.c.hits + 1))

    def prune(self, kept: Retention) -> int:
        key = tuple_(schedules.c.problem_sha256, schedules.c.objective)
        others = select(*key.clauses).order_by(*_LAST_USED).offset(kept.most)
        old = or_(key.in_(others), schedules.c.used < kept.since)
        with self._database.write() as db:
            return db.execute(delete(schedules).where(old)).rowcount
