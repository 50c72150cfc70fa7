"""`Streams`: jobs that are streams of steps. The training schedules each step itself; a stream keeps its problem, and
the rules that the last training told, from which the next one starts."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, delete, insert, select

from optpipe.model.problem import Problem
from optpipe_cache.features import structure
from optpipe_server.database.engine import Database, now
from optpipe_server.database.incumbents import add_log_line, locked, update_job
from optpipe_server.database.jobs import InitialResult, Jobs, NewJob
from optpipe_server.database.refusals import NO_STREAM, ConflictError
from optpipe_server.database.tables import jobs, problems, rules


class Streams:
    """Each method is one transaction."""

    def __init__(self, database: Database, all_jobs: Jobs) -> None:
        self._database, self._jobs = database, all_jobs

    def open(self, tenant: str, problem: Problem) -> tuple[str, bool]:
        """Return the tenant's stream on these devices, stages and ops, and whether it is new."""
        key = f"stream {structure(problem)}"  # no client's idempotency key has a space
        return self._jobs.add(tenant, NewJob(problem, is_stream=True), InitialResult(), queue=1, key=key)

    def tell(self, tenant: str, job_id: str, **told: Any) -> None:
        """Replace the rules of a stream; `told` has the columns of `rules`.

        Raises `ConflictError` if the job is no stream.
        """
        with self._database.write() as db:
            job = locked(db, tenant, job_id)
            if job.state != "stream":
                raise ConflictError(NO_STREAM)
            at = now()
            db.execute(delete(rules).where(rules.c.job == job_id))
            db.execute(insert(rules).values(job=job_id, told_at=at, **told))
            update_job(db, job, ended_at=at)  # streams that nobody uses are not kept longer than other jobs
            text = "rules of step {step}: predicted {predicted_ms:.4g} ms, measured {measured_ms:.4g} ms"
            add_log_line(db, job_id, 0, text.format(**told))

    def stream(self, tenant: str, job_id: str) -> Row[Any]:
        """Return a stream's problem with the columns of its rules, which are None before any were told.

        Raises `ConflictError` if the job is no stream.
        """
        of_stream = problems.c.version == jobs.c.problem_version
        joined = jobs.join(problems, (problems.c.job == jobs.c.id) & of_stream).outerjoin(
            rules, rules.c.job == jobs.c.id
        )
        query = select(problems.c.problem, *(column for column in rules.c if column.name != "job")).select_from(joined)
        of_job = jobs.c.id == job_id, jobs.c.tenant == tenant, jobs.c.state == "stream"
        with self._database.read() as db:
            stream = db.execute(query.where(*of_job)).one_or_none()
        if stream is None:
            raise ConflictError(NO_STREAM)
        return stream
