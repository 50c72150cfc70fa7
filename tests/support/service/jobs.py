"""Jobs as clients and workers make them, for tests of the database."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sqlalchemy import select

from optpipe.options import SolveOptions
from optpipe.results import Result
from optpipe.schedule import Schedule
from optpipe_server.database import Database, InitialResult, Jobs, NewJob
from optpipe_server.database.tables import jobs
from support.problems.chain import chain, gpipe, one_by_one

PROBLEM = chain()
SLOW, FAST = one_by_one(PROBLEM), gpipe(PROBLEM)


def found(schedule: Schedule, bound: float | None = 1.0) -> Result:
    """Return a result with this schedule, as a search reports it."""
    result = Result("feasible", schedule, lower_bound_ms=bound, method=schedule.method)
    return replace(result, status="optimal") if result.gap == 0 else result


def start(schedule: Schedule | None = SLOW) -> InitialResult:
    return InitialResult(found(schedule)) if schedule else InitialResult()


def submit(database: Database, schedule: Schedule | None = SLOW, **wanted: Any) -> str:
    """Add a waiting job; return its id."""
    priority = wanted.pop("priority", 0)
    asked = NewJob(wanted.pop("problem", PROBLEM), SolveOptions(**wanted), priority)
    job_id, new = Jobs(database).add(asked, start(schedule), most_open=100)
    assert new
    return job_id


def row(database: Database, job_id: str) -> Any:
    """Return a job."""
    with database.read() as db:
        return db.execute(select(jobs).where(jobs.c.id == job_id)).one()
