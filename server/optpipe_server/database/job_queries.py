"""`JobQueries`: what clients read of jobs. Each method is one transaction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Row, func, select

from optpipe_server.database.engine import Database
from optpipe_server.database.job_statements import (
    INCUMBENT,
    INCUMBENTS,
    JOB_WITH_LAST,
    JOB_WITH_PROBLEM,
    JOB_WITHOUT_PROBLEM,
    LAST_PREFIX,
)
from optpipe_server.database.tables import State, bounds, jobs, log

MOST_LISTED = 200


class JobQueries:
    """The jobs of all tenants.

    A method with a parameter `tenant` finds that tenant's jobs only. The others are for callers that have found the job
    by one of these.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def job(self, tenant: str, job_id: str) -> Row[Any] | None:
        """Return a job with its current problem in the column `problem`."""
        with self._database.read() as db:
            return db.execute(JOB_WITH_PROBLEM, {"job": job_id, "tenant": tenant}).one_or_none()

    def job_without_problem(self, tenant: str, job_id: str) -> Row[Any] | None:
        """Return a job without its problem."""
        with self._database.read() as db:
            return db.execute(JOB_WITHOUT_PROBLEM, {"job": job_id, "tenant": tenant}).one_or_none()

    def job_with_last_incumbent(self, tenant: str, job_id: str) -> tuple[Row[Any], Any] | None:
        """Return a job without its problem, and its last incumbent or None, both as of the same moment; None if there
        is no such job."""
        with self._database.read() as db:
            job = db.execute(JOB_WITH_LAST, {"job": job_id, "tenant": tenant}).one_or_none()
        if job is None:
            return None
        if not job.last_seq:
            return job, None
        return job, SimpleNamespace(
            **{column.name: job._mapping[f"{LAST_PREFIX}{column.name}"] for column in INCUMBENT.selected_columns}
        )

    def updates(self, job_id: str, after: int) -> tuple[Row[Any] | None, Sequence[Row[Any]]]:
        """Return a job of any tenant, and its incumbents numbered above `after` without their programs.

        None is missing of the incumbents that the job's `last_seq` counts.
        """
        with self._database.read() as db:
            job = db.execute(select(jobs).where(jobs.c.id == job_id)).one_or_none()
        return job, self.incumbents(job_id, after) if job and job.last_seq > after else ()

    def page(self, tenant: str, state: State | None, before: int | None, limit: int) -> Sequence[Row[Any]]:
        """Return up to `limit` jobs without their problems, newest first, all submitted before the job of number
        `before`."""
        query = select(jobs).where(jobs.c.tenant == tenant)
        if state is not None:
            query = query.where(jobs.c.state == state)
        if before is not None:
            query = query.where(jobs.c.number < before)
        with self._database.read() as db:
            return db.execute(query.order_by(jobs.c.number.desc()).limit(limit)).all()

    def incumbents(self, job_id: str, after: int = 0) -> Sequence[Row[Any]]:
        """Return the incumbents numbered above `after`, in order, each with its adoption and without its programs."""
        with self._database.read() as db:
            return db.execute(INCUMBENTS, {"job": job_id, "after": after}).all()

    def bounds(self, job_id: str) -> Sequence[Row[Any]]:
        """Return the lower bounds that were told for the job's problems, in order."""
        of_job = select(bounds).where(bounds.c.job == job_id)
        with self._database.read() as db:
            return db.execute(of_job.order_by(bounds.c.problem_version, bounds.c.lower_bound_ms)).all()

    def incumbent(self, job_id: str, seq: int) -> Row[Any] | None:
        """Return one incumbent with its programs and its problem."""
        with self._database.read() as db:
            return db.execute(INCUMBENT, {"job": job_id, "seq": seq}).one_or_none()

    def versions(self, job_ids: Collection[str]) -> dict[str, int]:
        """Return the versions of these jobs by id; purged jobs are missing."""
        with self._database.read() as db:
            return {
                row.id: row.version
                for row in db.execute(select(jobs.c.id, jobs.c.version).where(jobs.c.id.in_(job_ids)))
            }

    def log(self, job_id: str, after: int, limit: int) -> Sequence[Row[Any]]:
        """Return the lines of the job's log numbered above `after`, oldest first."""
        with self._database.read() as db:
            return db.execute(
                select(log).where(log.c.job == job_id, log.c.number > after).order_by(log.c.number).limit(limit)
            ).all()

    def queue(self, tenant: str) -> tuple[Sequence[tuple[str, str | None]], int, int]:
        """Return the tenant's running jobs (id and worker), how many of its jobs wait, and how many jobs of others will
        run before the first of these."""
        own = (jobs.c.tenant == tenant, jobs.c.state == "queued")
        order = jobs.c.priority.desc(), jobs.c.number
        with self._database.read() as db:
            query = select(jobs.c.id, jobs.c.worker).where(jobs.c.tenant == tenant, jobs.c.state == "running")
            running = [(row.id, row.worker) for row in db.execute(query.order_by(jobs.c.number))]
            waiting = db.execute(select(func.count()).where(*own)).scalar_one()
            first = db.execute(select(jobs.c.priority, jobs.c.number).where(*own).order_by(*order).limit(1)).first()
            if first is None:
                return running, 0, 0
            sooner = (jobs.c.priority > first.priority) | (
                (jobs.c.priority == first.priority) & (jobs.c.number < first.number)
            )
            ahead = db.execute(select(func.count()).where(jobs.c.state == "queued", sooner)).scalar_one()
            return running, waiting, ahead

    def count(self) -> dict[State, int]:
        """Count the jobs of all tenants by state."""
        with self._database.read() as db:
            return {
                row.state: row.n
                for row in db.execute(select(jobs.c.state, func.count().label("n")).group_by(jobs.c.state))
            }
