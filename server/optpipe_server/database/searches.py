"""`Searches`: what a worker writes about the jobs that it solves.

Each taking of a job has a number, its attempt. A job whose worker is lost is taken again, a job with other costs waits
again, and what the former worker writes from then on is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import structlog
from sqlalchemy import Connection, Row, or_, select, update

from optpipe.errors import InputError
from optpipe.evaluate.objective import gap, length_ms, raises
from optpipe.model.problem import Problem
from optpipe.options import SolveOptions
from optpipe.process.protocol import Programs
from optpipe.results import NOTHING_YET, Result
from optpipe.schedule import Schedule
from optpipe_server import metrics
from optpipe_server.database.changes import (
    add_bound,
    add_log_line,
    append,
    end_values,
    incumbent_values,
    last_figures,
    storable_text,
    update_best,
    update_job,
)
from optpipe_server.database.engine import Database, now
from optpipe_server.database.jobs import options_of
from optpipe_server.database.tables import OPEN, Level, State, incumbents, jobs, problems

MOST_CRASHES = 1  # of solver processes, after which a job goes on
MOST_LOSSES = 5  # of workers, after which a job goes on; one that crashes its worker each time has to end
WITH_SCHEDULE = ("feasible", "optimal")  # the status of a job that has a schedule

log = structlog.get_logger("optpipe.work")


class LostError(Exception):
    """The job is over or purged, or another attempt has begun. Nothing was written."""


@dataclass(frozen=True)
class Claim:
    """A job that a worker has taken, in the state in which the search goes on."""

    job_id: str
    attempt: int
    problem: Problem
    problem_version: int
    options: SolveOptions
    spent_s: float
    best: Schedule | None  # re-timed for `problem`; verified on it only if `best_version` is its version
    best_version: int  # version of the problem that `best` was found for
    lower_bound_ms: float | None  # of this problem


class Searches:
    """The jobs of one worker, which the database and the logs call by its name."""

    def __init__(self, database: Database, worker: str) -> None:
        self._database, self._worker = database, worker

    def first_open(self, but: Collection[str]) -> str | None:
        """Return the id of the open job of the highest priority, among these the oldest; None if there is none.

        This is the queue of a service that is one process, which runs the jobs `but`: others that seem to run were left
        by a former process.
        """
        waits = or_(jobs.c.state == "queued", (jobs.c.state == "running") & jobs.c.id.not_in(but))
        first = select(jobs.c.id).where(waits).order_by(jobs.c.priority.desc(), jobs.c.number).limit(1)
        with self._database.read() as db:
            job_id: str | None = db.execute(first).scalar_one_or_none()
        return job_id

    def begin(self, job_id: str) -> Claim | None:
        """Take a job that waits, or whose worker is lost; None if it is over or purged."""
        with self._database.write() as db:
            of_job = select(jobs).where(jobs.c.id == job_id, jobs.c.state.in_(OPEN))
            job = db.execute(of_job.with_for_update()).one_or_none()
            if job is None or (job.state == "running" and not _freed(db, job)):
                return None
            attempt, started_at = job.attempt + 1, job.started_at or now()
            update_job(db, job, state="running", attempt=attempt, worker=self._worker, started_at=started_at)
            add_log_line(db, job_id, attempt, f"taken by {self._worker}")
            of_problem = problems.c.job == job_id, problems.c.version == job.problem_version
            problem_text = db.execute(select(problems.c.problem).where(*of_problem)).scalar_one()
            of_last = incumbents.c.job == job_id, incumbents.c.seq == job.last_seq
            last = db.execute(select(incumbents).where(*of_last)).one_or_none()
        problem, best = Problem.model_validate_json(problem_text), None
        if last is not None:
            with suppress(InputError):  # its ops do not exist in the current problem
                best = Programs.model_validate_json(last.programs).schedule(problem, last.method)
        return Claim(
            job_id=job_id,
            attempt=attempt,
            problem=problem,
            problem_version=job.problem_version,
            options=options_of(job),
            spent_s=job.spent_s,
            best=best,
            best_version=last.problem_version if last else 0,
            lower_bound_ms=job.lower_bound_ms,
        )

    def cancel_requests(self, claims: Collection[Claim]) -> dict[str, bool]:
        """Return by id whether the jobs are to be cancelled. Lost jobs are missing, also those with other costs now."""
        columns = jobs.c.id, jobs.c.attempt, jobs.c.cancel_requested
        of_claims = jobs.c.id.in_([claim.job_id for claim in claims]), jobs.c.state == "running"
        held = {(claim.job_id, claim.attempt) for claim in claims}
        rows = self._database.rows(select(*columns).where(*of_claims))
        return {row.id: row.cancel_requested for row in rows if (row.id, row.attempt) in held}

    def store_spent(self, claim: Claim, spent_s: float) -> None:
        """Store the seconds spent, in case that this worker is lost."""
        with self._database.write() as db:
            db.execute(update(jobs).where(*_of_claim(claim)).values(spent_s=spent_s))

    def append(self, claim: Claim, result: Result) -> None:
        """Commit the result's schedule if it is better than the last one; safe to repeat. Raises `LostError`."""
        row = incumbent_values(result, "solver")
        with self._locked(claim) as (db, job):
            append(db, job, result, row, claim.attempt)

    def raise_bound(self, claim: Claim, lower_bound_ms: float) -> None:
        """Commit a bound, if it is higher than the last one; safe to repeat. Raises `LostError`."""
        with self._locked(claim) as (db, job):
            if job.lower_bound_ms is None or raises(lower_bound_ms, job.lower_bound_ms):
                last = last_figures(db, job)
                length = length_ms(last, claim.options.objective) if last else None
                update_job(db, job, lower_bound_ms=lower_bound_ms, gap=gap(length, lower_bound_ms))
                add_bound(db, job.id, job.problem_version, lower_bound_ms, now())

    def note(self, claim: Claim, text: str, level: Level = "info") -> None:
        """Add a line to the job's log. Raises `LostError`."""
        with self._locked(claim) as (db, _job):
            add_log_line(db, claim.job_id, claim.attempt, text, level)

    def finish(self, claim: Claim, state: State, result: Result, spent_s: float) -> bool:
        """End a job; return False if it has more time by now and waits again. Raises `LostError`.

        A job that has a schedule for its problem is `done` unless it was cancelled, and what is stored of it never gets
        worse. More time matters only if the time limit ended the search: for a job that is `done` without a proof, or
        failed without a schedule.
        """
        with self._locked(claim) as (db, job):
            more_time = options_of(job).time_limit_s > claim.options.time_limit_s
            if more_time and state in ("done", "failed") and result.status != "optimal" and not job.cancel_requested:
                update_job(db, job, state="queued", spent_s=spent_s, worker=None)
                return False
            last = last_figures(db, job)
            best = last and last.value_ms
            if best is None:  # what is not stored does not count
                result = replace(result, schedule=None, status="infeasible" if state == "infeasible" else "unknown")
            elif state != "cancelled":
                state = "done"
            text = result.explanation or (NOTHING_YET if state == "failed" else None)
            if state == "cancelled" and job.cancel_requested:
                text = job.reason  # of who has cancelled it
            reason = storable_text(text) if text else None
            over = {**end_values(state, reason), "spent_s": spent_s}
            if best is not None and (result.value_ms is None or raises(result.value_ms, best)):  # that one stands
                update_job(db, job, **over)
            else:
                update_best(db, job, result, **over)
            add_log_line(db, claim.job_id, claim.attempt, f"ended: {state}" + (f", {reason}" if reason else ""))
            return True

    def give_back(self, claim: Claim, spent_s: float, crash: str | None = None) -> bool:
        """Let the job wait again, for any worker. Raises `LostError`.

        With a `crash`, record that a solver's process ended on its own, and why; False if there have been too many.
        """
        with self._locked(claim) as (db, job):
            add_log_line(
                db, claim.job_id, claim.attempt, crash or f"given back by {self._worker}", "error" if crash else "info"
            )
            crashes = job.crashes + bool(crash)
            again = not crash or crashes <= MOST_CRASHES
            if again and job.cancel_requested:
                update_job(db, job, crashes=crashes, **end_values("cancelled", job.reason))
            else:
                waits = {"state": "queued", "worker": None} if again else {}
                update_job(db, job, crashes=crashes, spent_s=spent_s, **waits)
            return again

    @contextmanager
    def _locked(self, claim: Claim) -> Iterator[tuple[Connection, Row[Any]]]:
        with self._database.write() as db:
            job = db.execute(select(jobs).where(*_of_claim(claim)).with_for_update()).one_or_none()
            if job is None:
                raise LostError(claim.job_id)
            yield db, job


def _of_claim(claim: Claim) -> tuple[Any, ...]:
    return jobs.c.id == claim.job_id, jobs.c.attempt == claim.attempt, jobs.c.state == "running"


def _freed(db: Connection, job: Row[Any]) -> bool:
    """Record that the job's worker is gone; return whether the job goes on, or end it with what it has."""
    metrics.LOST.inc()
    log.warning("its worker is gone", job=job.id, worker=job.worker)
    add_log_line(db, job.id, job.attempt, f"its worker {job.worker} is gone", "warning")
    losses = job.losses + 1
    if not job.cancel_requested and losses <= MOST_LOSSES:
        update_job(db, job, losses=losses)
        return True
    if job.cancel_requested:
        over = end_values("cancelled", job.reason)
    else:
        over = end_values("done" if job.status in WITH_SCHEDULE else "failed", f"its worker was lost {losses} times")
        add_log_line(db, job.id, job.attempt, over["reason"], "error")
    update_job(db, job, losses=losses, **over)
    return False
