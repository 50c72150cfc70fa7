"""`TableStorage`: the cache as rows of the service's database."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from sqlalchemy import ColumnElement, delete, insert, or_, select, tuple_, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from optpipe_cache import Retention, StoredRow
from optpipe_server.database.engine import Database
from optpipe_server.database.tables import schedules

_LAST_USED = schedules.c.used.desc(), schedules.c.problem_sha256


class TableStorage:
    """An `optpipe_cache.Storage` for all processes that share the database. Raises `SQLAlchemyError`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def entry(self, problem_sha256: str, objective: str) -> str | None:
        rows = _rows(problem_sha256=problem_sha256, objective=objective)
        with self._database.read() as db:
            return db.execute(select(schedules.c.entry).where(*rows)).scalar_one_or_none()

    def similar(self, structure: str, objective: str, most: int) -> Sequence[tuple[str, bytes]]:
        rows = _rows(structure=structure, objective=objective)
        near = select(schedules.c.problem_sha256, schedules.c.features).where(*rows).order_by(*_LAST_USED).limit(most)
        with self._database.read() as db:
            return [(row.problem_sha256, row.features) for row in db.execute(near)]

    def entries(self) -> Sequence[tuple[str, int]]:
        rows = select(schedules.c.entry, schedules.c.hits).order_by(*_LAST_USED)
        with self._database.read() as db:
            return [(row.entry, row.hits) for row in db.execute(rows)]

    def swap(self, row: StoredRow, known: str | None) -> bool:
        if known is None:
            try:
                with self._database.write() as db:
                    db.execute(insert(schedules).values(**asdict(row)))
            except IntegrityError:  # another process was first
                return False
            return True
        columns = {name: value for name, value in asdict(row).items() if name != "hits"}
        same = _rows(problem_sha256=row.problem_sha256, objective=row.objective, entry=known)
        with self._database.write() as db:
            return db.execute(update(schedules).where(*same).values(**columns)).rowcount == 1

    def found(self, problem_sha256: str, objective: str, used: str) -> None:
        rows = _rows(problem_sha256=problem_sha256, objective=objective)
        with suppress(SQLAlchemyError), self._database.write() as db:  # an answer that was read is an answer
            db.execute(update(schedules).where(*rows).values(used=used, hits=schedules.c.hits + 1))

    def prune(self, kept: Retention) -> int:
        key = tuple_(schedules.c.problem_sha256, schedules.c.objective)
        others = select(*key.clauses).order_by(*_LAST_USED).offset(kept.most)
        old = or_(key.in_(others), schedules.c.used < kept.since)
        with self._database.write() as db:
            return db.execute(delete(schedules).where(old)).rowcount


def _rows(**values: str) -> list[ColumnElement[bool]]:
    """Which rows have these values."""
    return [schedules.c[name] == value for name, value in values.items()]
