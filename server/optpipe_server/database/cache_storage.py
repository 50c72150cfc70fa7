"""`TableStorage`: a tenant's cache as rows of the service's database."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from sqlalchemy import ColumnElement, Update, bindparam, delete, insert, or_, select, tuple_, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from optpipe_cache import Retention, StoredRow
from optpipe_cache.storage import Cells
from optpipe_server.database.engine import Database
from optpipe_server.database.tables import schedules


class TableStorage:
    """An `optpipe_cache.Storage`: the rows of one tenant, for all processes that share the database. Raises
    `SQLAlchemyError`."""

    written_here_only = True

    def __init__(self, database: Database, tenant: str) -> None:
        self._database, self._tenant = database, tenant
        self._of_tenant = schedules.c.tenant == tenant

    def entry(self, problem_sha256: str, objective: str) -> str | None:
        with self._database.read() as db:
            return db.execute(_ENTRY, self._of(problem_sha256=problem_sha256, objective=objective)).scalar_one_or_none()

    def similar(self, structure: str, objective: str, cells: Cells, most: int) -> Sequence[tuple[str, bytes]]:
        wanted = self._of(structure=structure, objective=objective) | {"most": most}
        found, where = (_SIMILAR, {}) if cells is None else (_SIMILAR_IN_CELLS, {"cells": cells})
        with self._database.read() as db:
            return [(row.problem_sha256, row.features) for row in db.execute(found, wanted | where)]

    def _of(self, **values: str) -> dict[str, object]:
        return {"tenant": self._tenant, **values}

    def entries(self) -> Sequence[tuple[str, int]]:
        rows = select(schedules.c.entry, schedules.c.hits).where(self._of_tenant).order_by(*_LAST_USED)
        with self._database.read() as db:
            return [(row.entry, row.hits) for row in db.execute(rows)]

    def swap(self, row: StoredRow, known: str | None) -> bool:
        if known is None:
            try:
                with self._database.write() as db:
                    db.execute(insert(schedules).values(tenant=self._tenant, **asdict(row)))
            except IntegrityError:  # another process was first
                return False
            return True
        columns = {name: value for name, value in asdict(row).items() if name != "hits"}
        swapped = self._update(row.problem_sha256, row.objective).where(schedules.c.entry == known).values(**columns)
        with self._database.write() as db:
            return db.execute(swapped).rowcount == 1

    def found(self, problem_sha256: str, objective: str, used: str) -> None:
        with suppress(SQLAlchemyError), self._database.write() as db:  # an answer that was read is an answer
            db.execute(self._update(problem_sha256, objective).values(used=used, hits=schedules.c.hits + 1))

    def _update(self, problem_sha256: str, objective: str) -> Update:
        return update(schedules).where(
            self._of_tenant, schedules.c.problem_sha256 == problem_sha256, schedules.c.objective == objective
        )

    def prune(self, kept: Retention) -> int:
        key = tuple_(schedules.c.problem_sha256, schedules.c.objective)
        others = select(*key.clauses).where(self._of_tenant).order_by(*_LAST_USED).offset(kept.most)
        old = or_(key.in_(others), schedules.c.used < kept.since)
        with self._database.write() as db:
            return db.execute(delete(schedules).where(self._of_tenant, old)).rowcount


def prune_schedules(database: Database, kept: Retention) -> int:
    """Delete the schedules of all tenants that were not used for so many days; return how many were deleted."""
    old = schedules.c.used < kept.since
    with database.read() as db:
        if db.execute(select(schedules.c.tenant).where(old).limit(1)).first() is None:
            return 0
    with database.write() as db:
        return db.execute(delete(schedules).where(old)).rowcount


_LAST_USED = schedules.c.used.desc(), schedules.c.problem_sha256


def _where(*names: str) -> list[ColumnElement[bool]]:
    return [schedules.c[name] == bindparam(name) for name in names]


# Run with every submission, so built once.
_ENTRY = select(schedules.c.entry).where(*_where("tenant", "problem_sha256", "objective"))
_SIMILAR = (
    select(schedules.c.problem_sha256, schedules.c.features)
    .where(*_where("tenant", "structure", "objective"))
    .limit(bindparam("most"))
)
_SIMILAR_IN_CELLS = _SIMILAR.where(schedules.c.cell.in_(bindparam("cells", expanding=True)))
