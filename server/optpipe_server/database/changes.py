"""Changes of a job that `jobs` and `searches` share, and what is refused, each with a sentence.

Incumbents and bounds are append-only; among those of one problem each is better than the one before.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from optpipe.evaluate.objective import raises
from optpipe.model.problem import Problem
from optpipe.process.protocol import Programs
from optpipe.results import Result
from optpipe_server.database.engine import now
from optpipe_server.database.tables import Level, Source, State, bounds, incumbents, jobs, log

_NEW_LINE = insert(log).inline()  # does not return the number
LONGEST_TEXT = 2000  # characters of a reason or a line of the log; some are what a solver wrote before it crashed
CANCELLED = "the job was cancelled"
CANCELLED_DETAIL = "The job is cancelled; submit the problem as another job."
NO_JOB = "There is no such job."
NO_INCUMBENT = "The job has no such incumbent."


class MissingError(LookupError):
    """There is no such job, or the job has no such incumbent."""


class ConflictError(Exception):
    """The request contradicts the state of the job; the message says how."""


class KeyReusedError(Exception):
    """The idempotency key was used with another body before."""


class TooManyOpenError(Exception):
    """As many jobs of the key are open as may be."""


class StaleError(Exception):
    """The job has changed since the version that the client knows."""


def locked(db: Connection, job_id: str) -> Row[Any]:
    """The job, which nobody else can change until this transaction ends. Raises `MissingError` if there is none."""
    job = db.execute(select(jobs).where(jobs.c.id == job_id).with_for_update()).one_or_none()
    if job is None:
        raise MissingError(NO_JOB)
    return job


def incumbent_values(result: Result, source: Source) -> dict[str, Any]:
    """Return the columns that store a result's schedule. Call it before the transaction, which others wait for."""
    schedule = result.schedule
    assert schedule is not None
    return {
        "source": source,
        "method": result.method or schedule.method,
        "makespan_ms": schedule.makespan_ms,
        "span_ms": schedule.span_ms,
        "value_ms": result.value_ms,
        "programs": Programs.from_schedule(schedule).model_dump_json(exclude={"rules"}),  # which only a search reads
    }


def append(db: Connection, job: Row[Any], result: Result, row: dict[str, Any], attempt: int) -> None:
    """Store the result's schedule, by its columns `row`, as the next incumbent of a job that this transaction
    holds.

    A schedule that is no better than the last one for the same problem is not stored: it may be the one that the search
    began with.
    """
    last = last_figures(db, job)
    if last is not None and row["value_ms"] >= last.value_ms:
        return
    of_job = {"job": job.id, "seq": job.last_seq + 1, "problem_version": job.problem_version, "attempt": attempt}
    db.execute(insert(incumbents), {**of_job, **row, "found_at": now()})
    update_best(db, job, result, last_seq=job.last_seq + 1, value_ms=row["value_ms"])


def last_figures(db: Connection, job: Row[Any]) -> Any:
    """Return value, makespan and span of the job's best schedule for its current problem; None if it has none."""
    last = (
        incumbents.c.job == job.id,
        incumbents.c.seq == job.last_seq,
        incumbents.c.problem_version == job.problem_version,
    )
    figures = incumbents.c.value_ms, incumbents.c.makespan_ms, incumbents.c.span_ms
    return db.execute(select(*figures).where(*last)).one_or_none()


def update_best(db: Connection, job: Row[Any], result: Result, **values: Any) -> None:
    """Update status and bound of a job that this transaction holds, and other columns. Keep a bound that is higher than
    the last one."""
    best = best_values(result, job.lower_bound_ms)
    update_job(db, job, **best, **values)
    bound, before = best["lower_bound_ms"], job.lower_bound_ms
    if bound is not None and (before is None or raises(bound, before)):
        add_bound(db, job.id, job.problem_version, bound, now())


def add_bound(db: Connection, job_id: str, problem_version: int, lower_bound_ms: float, at: str) -> None:
    of_job = {"job": job_id, "problem_version": problem_version, "lower_bound_ms": lower_bound_ms}
    db.execute(insert(bounds), {**of_job, "found_at": at})


def update_job(db: Connection, job: Row[Any], **values: Any) -> None:
    """Update a job that this transaction holds, and its version, which clients wait for."""
    db.execute(update(jobs).where(jobs.c.id == job.id).values(version=jobs.c.version + 1, **values))


def end_values(state: State, reason: str | None) -> dict[str, Any]:
    """Return the columns of a job that is over, which no worker has any more."""
    return {"state": state, "reason": reason, "ended_at": now(), "worker": None}


def best_values(result: Result, lower_bound_ms: float | None = None) -> dict[str, Any]:
    """Return the columns of a problem's best schedule and bound, by a result and by a former bound."""
    bounds_ms = [bound for bound in (result.lower_bound_ms, lower_bound_ms) if bound is not None]
    result = replace(result, lower_bound_ms=max(bounds_ms, default=None))
    return {"status": result.status, "lower_bound_ms": result.lower_bound_ms, "gap": result.gap}


def add_log_line(db: Connection, job_id: str, attempt: int, text: str, level: Level = "info") -> None:
    """Add a line to the job's log."""
    db.execute(_NEW_LINE, {"job": job_id, "at": now(), "attempt": attempt, "level": level, "text": storable_text(text)})


def storable_text(text: str) -> str:
    """Return the text without NUL, lone surrogates and excess length, so that both databases store it."""
    return text[:LONGEST_TEXT].replace("\0", "\ufffd").encode(errors="replace").decode()


def problem_text(problem: Problem) -> str:
    return json.dumps(problem.to_dict(), separators=(",", ":"))
