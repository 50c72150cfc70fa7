"""`JobQueries`: what clients read of jobs. Each method is one transaction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Row, Select, bindparam, func, select

from optpipe_server.database.engine import Database
from optpipe_server.database.refusals import NO_JOB, MissingError
from optpipe_server.database.tables import State, adoptions, bounds, incumbents, jobs, log, problems

MOST_LISTED = 200

# The statements that run often, built once: building one costs more than running it.
_JOB = select(jobs).where(jobs.c.id == bindparam("job"))
_OF_PROBLEM = (problems.c.job == incumbents.c.job) & (problems.c.version == incumbents.c.problem_version)
_OF_ADOPTION = (adoptions.c.job == incumbents.c.job) & (adoptions.c.seq == incumbents.c.seq)
_INCUMBENTS: Select[Any] = (
    select(
        *(column for column in incumbents.c if column.name != "programs"),
        adoptions.c.step,
        adoptions.c.measured_iteration_ms,
        adoptions.c.adopted_at,
        problems.c.sha256.label("problem_sha256"),
    )
    .select_from(incumbents.join(problems, _OF_PROBLEM).outerjoin(adoptions, _OF_ADOPTION))
    .where(incumbents.c.job == bindparam("job"), incumbents.c.seq > bindparam("after"))
    .order_by(incumbents.c.seq)
)
_INCUMBENT = _INCUMBENTS.add_columns(incumbents.c.programs, problems.c.problem).limit(1)


class JobQueries:
    """Reads jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def job(self, job_id: str) -> Row[Any]:
        """Return a job. Raises `MissingError`."""
        with self._database.read() as db:
            job = db.execute(_JOB, {"job": job_id}).one_or_none()
        if job is None:
            raise MissingError(NO_JOB)
        return job

    def problem(self, job: Row[Any]) -> str:
        """Return the text of a job's current problem. Raises `MissingError` if the job was deleted meanwhile."""
        of_job = problems.c.job == job.id, problems.c.version == job.problem_version
        with self._database.read() as db:
            text: str | None = db.execute(select(problems.c.problem).where(*of_job)).scalar_one_or_none()
        if text is None:
            raise MissingError(NO_JOB)
        return text

    def updates(self, job_id: str, after: int) -> tuple[Row[Any] | None, Sequence[Row[Any]]]:
        """Return a job, and its incumbents numbered above `after` without their programs.

        None is missing of the incumbents that the job's `last_seq` counts.
        """
        with self._database.read() as db:
            job = db.execute(select(jobs).where(jobs.c.id == job_id)).one_or_none()
        return job, self.incumbents(job_id, after) if job and job.last_seq > after else ()

    def page(self, state: State | None, before: int | None, limit: int) -> Sequence[Row[Any]]:
        """Return up to `limit` jobs without their problems, newest first, all submitted before the job of number
        `before`."""
        query = select(jobs)
        if state is not None:
            query = query.where(jobs.c.state == state)
        if before is not None:
            query = query.where(jobs.c.number < before)
        with self._database.read() as db:
            return db.execute(query.order_by(jobs.c.number.desc()).limit(limit)).all()

    def incumbents(self, job_id: str, after: int = 0) -> Sequence[Row[Any]]:
        """Return the incumbents numbered above `after`, in order, each with its adoption and without its programs."""
        with self._database.read() as db:
            return db.execute(_INCUMBENTS, {"job": job_id, "after": after}).all()

    def bounds(self, job_id: str) -> Sequence[Row[Any]]:
        """Return the lower bounds that were told for the job's problems, in order."""
        of_job = select(bounds).where(bounds.c.job == job_id)
        with self._database.read() as db:
            return db.execute(of_job.order_by(bounds.c.problem_version, bounds.c.lower_bound_ms)).all()

    def incumbent(self, job_id: str, seq: int) -> Row[Any] | None:
        """Return one incumbent with its programs and its problem."""
        with self._database.read() as db:
            following = db.execute(_INCUMBENT, {"job": job_id, "after": seq - 1}).one_or_none()
        return following if following is not None and following.seq == seq else None

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

    def queue(self) -> tuple[Sequence[tuple[str, str | None]], int]:
        """Return the running jobs (id and worker), and how many jobs wait."""
        with self._database.read() as db:
            query = select(jobs.c.id, jobs.c.worker).where(jobs.c.state == "running")
            running = [(row.id, row.worker) for row in db.execute(query.order_by(jobs.c.number))]
            waiting = select(func.count()).select_from(jobs).where(jobs.c.state == "queued")
            return running, db.execute(waiting).scalar_one()

    def count(self) -> dict[State, int]:
        """Count the jobs by state."""
        with self._database.read() as db:
            return {
                row.state: row.n
                for row in db.execute(select(jobs.c.state, func.count().label("n")).group_by(jobs.c.state))
            }
