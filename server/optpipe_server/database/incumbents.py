"""Incumbents: append-only, numbered, each better than those before it of its problem. What both sides of the database
share."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from optpipe.anytime import Result
from optpipe.model.problem import Problem
from optpipe.process.protocol import Programs
from optpipe_server.database.engine import now
from optpipe_server.database.tables import Level, Source, incumbents, jobs, log, problems

_NEW_LINE = insert(log).inline()  # its number is not asked for
LONGEST_TEXT = 2000  # of a reason or a line of the log; some are a solver's last words


def written(result: Result, source: Source) -> dict[str, Any]:
    """A result's schedule as an incumbent's row; made before the transaction, for which others wait."""
    schedule = result.schedule
    assert schedule is not None
    return {
        "source": source,
        "method": result.method or schedule.method,
        "makespan_ms": schedule.makespan_ms,
        "span_ms": schedule.span_ms,
        "programs": Programs.of(schedule).model_dump_json(),
    }


def append(db: Connection, job: Row[Any], result: Result, row: dict[str, Any], attempt: int) -> None:
    """The result's schedule, `written`, as the next incumbent of a job whose row this transaction holds.

    Only where it is better than the last one for the same problem: what is no better is known already, such as what a
    search began with.
    """
    last = best_ms(db, job)
    if last is not None and row[f"{job.objective}_ms"] >= last:
        return
    of_job = {"job": job.id, "seq": job.last_seq + 1, "problem_version": job.problem_version, "attempt": attempt}
    db.execute(insert(incumbents), {**of_job, **row, "found_at": now()})
    change(db, job, last_seq=job.last_seq + 1, **known(result, job.lower_bound_ms))


def best_ms(db: Connection, job: Row[Any]) -> float | None:
    """How long the job's best schedule for its present problem is; None where it has none."""
    last = (
        incumbents.c.job == job.id,
        incumbents.c.seq == job.last_seq,
        incumbents.c.problem_version == job.problem_version,
    )
    return db.execute(select(incumbents.c[f"{job.objective}_ms"]).where(*last)).scalar_one_or_none()


def change(db: Connection, job: Row[Any], **values: Any) -> None:
    """Updates a job whose row this transaction holds; whoever waits for news of it sees its version grow."""
    db.execute(update(jobs).where(jobs.c.id == job.id).values(version=jobs.c.version + 1, **values))


def known(result: Result, lower_bound_ms: float | None = None) -> dict[str, Any]:
    """What is known of a problem by a result, and by a bound that there was."""
    bounds = [bound for bound in (result.lower_bound_ms, lower_bound_ms) if bound is not None]
    result = replace(result, lower_bound_ms=max(bounds, default=None))
    return {"status": result.status, "lower_bound_ms": result.lower_bound_ms, "gap": result.gap}


def note(db: Connection, job_id: str, attempt: int, text: str, level: Level = "info") -> None:
    """A line of the job's log."""
    db.execute(_NEW_LINE, {"job": job_id, "at": now(), "attempt": attempt, "level": level, "text": plain(text)})


def plain(text: str) -> str:
    """Text that both databases take, whoever wrote it: without NUL and lone surrogates, and no longer than anybody
    reads."""
    return text[:LONGEST_TEXT].replace("\0", "\ufffd").encode(errors="replace").decode()


def problem_text(problem: Problem) -> str:
    return json.dumps(problem.to_dict(), separators=(",", ":"))


def state_of_work(db: Connection, job: Row[Any]) -> tuple[str, Row[Any] | None]:
    """The problem that counts for the job, and its last incumbent with its programs, as texts."""
    of_problem = problems.c.job == job.id, problems.c.version == job.problem_version
    last = incumbents.c.job == job.id, incumbents.c.seq == job.last_seq
    problem: str = db.execute(select(problems.c.problem).where(*of_problem)).scalar_one()
    return problem, db.execute(select(incumbents).where(*last)).one_or_none()
