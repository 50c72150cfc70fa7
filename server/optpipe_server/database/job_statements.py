"""The statements of `jobs` that run often, built once: building one costs more than running it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, bindparam, insert, select, text

from optpipe_server.database.tables import adoptions, incumbents, jobs, problems

LAST_PREFIX = "of_last_"  # prefix of an incumbent's columns in a row with its job
_SHORT: list[ColumnElement[Any]] = [column for column in incumbents.c if column.name != "programs"]
_SHORT += [
    adoptions.c.step,
    adoptions.c.measured_iteration_ms,
    adoptions.c.adopted_at,
    problems.c.sha256.label("problem_sha256"),
]
_OF_PROBLEM = (problems.c.job == incumbents.c.job) & (problems.c.version == incumbents.c.problem_version)
_OF_ADOPTION = (adoptions.c.job == incumbents.c.job) & (adoptions.c.seq == incumbents.c.seq)


def _incumbents(*more: Any) -> Any:
    """Select incumbents without their programs, with adoption, problem hash and the columns `more`."""
    joined = incumbents.join(problems, _OF_PROBLEM).outerjoin(adoptions, _OF_ADOPTION)
    return select(*_SHORT, *more).select_from(joined).where(incumbents.c.job == bindparam("job"))


LOCK_TENANT = text("select pg_advisory_xact_lock(hashtextextended(:tenant, 0))")
NEW_JOB = insert(jobs).inline()  # does not return the number
JOB_WITHOUT_PROBLEM = select(jobs).where(jobs.c.id == bindparam("job"), jobs.c.tenant == bindparam("tenant"))
JOB_WITH_PROBLEM = (
    select(jobs, problems.c.problem)
    .select_from(jobs.join(problems, (problems.c.job == jobs.c.id) & (problems.c.version == jobs.c.problem_version)))
    .where(jobs.c.id == bindparam("job"), jobs.c.tenant == bindparam("tenant"))
)
INCUMBENTS = _incumbents().where(incumbents.c.seq > bindparam("after")).order_by(incumbents.c.seq)
INCUMBENT = _incumbents(incumbents.c.programs, problems.c.problem).where(incumbents.c.seq == bindparam("seq"))
JOB_WITH_LAST = (
    select(jobs, *(column.label(f"{LAST_PREFIX}{column.name}") for column in INCUMBENT.selected_columns))
    .select_from(
        jobs.outerjoin(incumbents, (incumbents.c.job == jobs.c.id) & (incumbents.c.seq == jobs.c.last_seq))
        .outerjoin(problems, _OF_PROBLEM)
        .outerjoin(adoptions, _OF_ADOPTION)
    )
    .where(jobs.c.id == bindparam("job"), jobs.c.tenant == bindparam("tenant"))
)
