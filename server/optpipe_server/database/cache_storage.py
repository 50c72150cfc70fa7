"""`TableStorage`: a tenant's cache as rows of the service's database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy import ColumnElement, bindparam, delete, insert, select, tuple_, update
from sqlalchemy.exc import IntegrityError

from optpipe_cache import StoredRow
from optpipe_server.database.engine import Database
from optpipe_server.database.tables import schedules


class TableStorage:
    """An `optpipe_cache.Storage`: the rows of one tenant, for all processes that share the database. Raises
    `SQLAlchemyError`."""

    def __init__(self, database: Database, tenant: str) -> None:
        self._database, self._tenant = database, tenant
        self._of_tenant = schedules.c.tenant == tenant

    def entry(self, problem_sha256: str, objective: str) -> str | None:
        with self._database.read() as db:
            return db.execute(_ENTRY, self._of(problem_sha256=problem_sha256, objective=objective)).scalar_one_or_none()

    def similar(self, shape: str, objective: str) -> Sequence[tuple[str, str]]:
        with self._database.read() as db:
            return [
                (row.problem_sha256, row.features)
                for row in db.execute(_SIMILAR, self._of(shape=shape, objective=objective))
            ]

    def _of(self, **values: str) -> dict[str, str]:
        return {"tenant": self._tenant, **values}

    def entries(self) -> Sequence[str]:
        newest = (
            select(schedules.c.entry)
            .where(self._of_tenant)
            .order_by(schedules.c.added.desc(), schedules.c.problem_sha256)
        )
        with self._database.read() as db:
            return db.execute(newest).scalars().all()

    def swap(self, row: StoredRow, known: str | None) -> bool:
        if known is None:
            try:
                with self._database.write() as db:
                    db.execute(insert(schedules).values(tenant=self._tenant, **asdict(row)))
            except IntegrityError:  # another process was first
                return False
            return True
        of_problem = (
            self._of_tenant,
            schedules.c.problem_sha256 == row.problem_sha256,
            schedules.c.objective == row.objective,
        )
        with self._database.write() as db:
            swapped = update(schedules).where(*of_problem, schedules.c.entry == known).values(**asdict(row))
            return db.execute(swapped).rowcount == 1

    def prune(self, keep: int) -> int:
        key = tuple_(schedules.c.problem_sha256, schedules.c.objective)
        newest = (
            select(*key.clauses)
            .where(self._of_tenant)
            .order_by(schedules.c.added.desc(), schedules.c.problem_sha256)
            .limit(keep)
        )
        with self._database.write() as db:
            return db.execute(delete(schedules).where(self._of_tenant, key.not_in(newest))).rowcount


def _where(*names: str) -> list[ColumnElement[bool]]:
    return [schedules.c[name] == bindparam(name) for name in names]


# Run with every submission, so built once.
_ENTRY = select(schedules.c.entry).where(*_where("tenant", "problem_sha256", "objective"))
_SIMILAR = select(schedules.c.problem_sha256, schedules.c.features).where(*_where("tenant", "shape", "objective"))
