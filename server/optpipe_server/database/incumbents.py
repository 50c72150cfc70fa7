"""Incumbents: append-only, numbered, each better than those before it of its problem. What both sides of the database share."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from optpipe.anytime import Result
from optpipe.child import Programs
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe_server.database.engine import now
from optpipe_server.database.tables import Level, Source, incumbents, jobs, log, problems


def append(db: Connection, job: Row[Any], result: Result, source: Source, attempt: int) -> int:
    """The result's schedule as the next incumbent of a job whose row this transaction holds; returns its number."""
    schedule = result.schedule
    assert schedule is not None
    seq: int = job.last_seq + 1
    db.execute(
        insert(incumbents).values(
            job=job.id,
            seq=seq,
            problem_version=job.problem_version,
            attempt=attempt,
            source=source,
            method=result.method or schedule.method,
            makespan_ms=schedule.makespan_ms,
            span_ms=schedule.span_ms,
            found_at=now(),
            programs=Programs.of(schedule).model_dump_json(),
        )
    )
    change(db, job, last_seq=seq, **known(result))
    return seq


def change(db: Connection, job: Row[Any], **values: Any) -> None:
    """Updates a job whose row this transaction holds; whoever waits for news of it sees its version grow."""
    db.execute(update(jobs).where(jobs.c.id == job.id).values(version=jobs.c.version + 1, **values))


def known(result: Result) -> dict[str, Any]:
    return {"status": result.status, "lower_bound_ms": result.lower_bound_ms, "gap": result.gap}


def note(db: Connection, job_id: str, attempt: int, text: str, level: Level = "info") -> None:
    """A line of the job's log."""
    db.execute(insert(log).values(job=job_id, at=now(), attempt=attempt, level=level, text=text))


def problem_text(problem: Problem) -> str:
    return json.dumps(problem.to_dict(), separators=(",", ":"))


def current_problem(db: Connection, job: Row[Any]) -> Problem:
    """The problem that counts for the job."""
    of_job = problems.c.job == job.id, problems.c.version == job.problem_version
    return Problem.model_validate_json(db.execute(select(problems.c.problem).where(*of_job)).scalar_one())


def best_schedule(db: Connection, job: Row[Any], problem: Problem) -> tuple[Schedule | None, int]:
    """The last incumbent, read for the given problem, and the version of the problem that it was for, 0 where there is none.

    It is re-timed where the costs have changed since, and not checked on them.
    """
    last = incumbents.c.job == job.id, incumbents.c.seq == job.last_seq
    row = db.execute(select(incumbents.c.programs, incumbents.c.method, incumbents.c.problem_version).where(*last)).one_or_none()
    if row is None:
        return None, 0
    return Programs.model_validate_json(row.programs).schedule(problem, row.method), row.problem_version
