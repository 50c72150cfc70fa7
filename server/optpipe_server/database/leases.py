"""`Leases`: what workers do with jobs.

A claim is a lease with an attempt number. Every write of a worker is fenced by that number: it fails once another
attempt has begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Row, case, select, update

from optpipe.errors import InputError
from optpipe.evaluate.objective import gap, length_ms, raises
from optpipe.model.problem import Problem
from optpipe.options import SolveOptions
from optpipe.process.protocol import Programs
from optpipe.results import Result
from optpipe.schedule import Schedule
from optpipe_server.database.engine import Database, clock_s, now
from optpipe_server.database.incumbents import (
    add_bound,
    add_log_line,
    append,
    end_values,
    incumbent_values,
    last_figures,
    problem_and_last_incumbent,
    storable_text,
    update_best,
    update_job,
)
from optpipe_server.database.jobs import options_of
from optpipe_server.database.refusals import CANCELLED
from optpipe_server.database.tables import Level, State, jobs

LEASE_S = 15.0
MOST_CRASHES = 1  # of solver processes, after which a job goes on

_ANY_WAITING = select(jobs.c.number).where(jobs.c.state == "queued").limit(1)
_FIRST_WAITING = (
    select(jobs)
    .where(jobs.c.state == "queued")
    .order_by(jobs.c.priority.desc(), jobs.c.number)
    .limit(1)
    .with_for_update(skip_locked=True)
)


class LostError(Exception):
    """The lease is another worker's, or the job is over or purged. Nothing was written."""


@dataclass(frozen=True)
class Claim:
    """A job that a worker has claimed, in the state in which the search goes on."""

    job_id: str
    number: int
    attempt: int
    problem: Problem
    problem_version: int
    options: SolveOptions
    spent_s: float
    best: Schedule | None  # re-timed for `problem`; verified on it only if `best_version` is its version
    best_version: int  # version of the problem that `best` was found for
    lower_bound_ms: float | None  # of this problem


@dataclass(frozen=True)
class RequestedChanges:
    """What the client has requested for a running job."""

    cancelled: bool
    problem_version: int


class Leases:
    """The leases of one worker, which other workers know by its name."""

    def __init__(self, database: Database, worker: str, lease_s: float = LEASE_S) -> None:
        self._database, self._worker, self._lease_s = database, worker, lease_s

    def claim(self) -> Claim | None:
        """Claim the waiting job of the highest priority, among these the oldest; None if no job waits."""
        with self._database.read() as db:
            if db.execute(_ANY_WAITING).first() is None:
                return None
        with self._database.write() as db:
            job = db.execute(_FIRST_WAITING).one_or_none()
            if job is None:
                return None
            update_job(
                db,
                job,
                state="running",
                attempt=job.attempt + 1,
                worker=self._worker,
                lease_until=clock_s() + self._lease_s,
                started_at=job.started_at or now(),
            )
            add_log_line(db, job.id, job.attempt + 1, f"taken by {self._worker}")
            work = problem_and_last_incumbent(db, job)
        return _claim(job, job.attempt + 1, *work)

    def renew(self, spent_s: Iterable[tuple[Claim, float]]) -> set[str]:
        """Renew the leases of these claims and store the seconds spent; return the ids of jobs that this worker has
        lost."""
        lost = set()
        for claim, spent in spent_s:
            same = jobs.c.problem_version == claim.problem_version  # the time of another problem does not count
            values = {"lease_until": clock_s() + self._lease_s, "spent_s": case((same, spent), else_=jobs.c.spent_s)}
            with self._database.write() as db:
                if db.execute(update(jobs).where(*_fence(claim)).values(values)).rowcount == 0:
                    lost.add(claim.job_id)
        return lost

    def requested_changes(self, attempts: Mapping[str, int]) -> dict[str, RequestedChanges]:
        """Return what is requested for these jobs (id -> attempt). Jobs that this worker has lost are missing."""
        columns = jobs.c.id, jobs.c.attempt, jobs.c.cancel_requested, jobs.c.problem_version
        with self._database.read() as db:
            rows = db.execute(select(*columns).where(jobs.c.id.in_(list(attempts)), jobs.c.state == "running")).all()
        return {
            row.id: RequestedChanges(row.cancel_requested, row.problem_version)
            for row in rows
            if row.attempt == attempts[row.id]
        }

    def append(self, claim: Claim, result: Result) -> bool:
        """Commit a verified schedule, unless it is no better than the last one; safe to repeat.

        Returns False if the job has another problem by now. Raises `LostError`.
        """
        row = incumbent_values(result, "solver")
        with self._locked(claim) as (db, job):
            if job.problem_version != claim.problem_version:
                return False
            append(db, job, result, row, claim.attempt)
            return True

    def raise_bound(self, claim: Claim, lower_bound_ms: float) -> bool:
        """Commit a bound, if it is higher than the last one; safe to repeat.

        Returns False if the job has another problem by now. Raises `LostError`.
        """
        with self._locked(claim) as (db, job):
            if job.problem_version != claim.problem_version:
                return False
            if job.lower_bound_ms is None or raises(lower_bound_ms, job.lower_bound_ms):
                last = last_figures(db, job)
                length = length_ms(last, claim.options.objective) if last else None
                update_job(db, job, lower_bound_ms=lower_bound_ms, gap=gap(length, lower_bound_ms))
                add_bound(db, job.id, job.problem_version, lower_bound_ms, now())
            return True

    def note(self, claim: Claim, text: str, level: Level = "info") -> None:
        """Add a line to the job's log. Raises `LostError`."""
        with self._locked(claim) as (db, _job):
            add_log_line(db, claim.job_id, claim.attempt, text, level)

    def reload(self, claim: Claim, spent_s: float) -> Claim:
        """Return the claim for the job as it is now: with another problem, more time, its best schedule. Raises
        `LostError`."""
        with self._locked(claim) as (db, job):
            work = problem_and_last_incumbent(db, job)
        return replace(_claim(job, claim.attempt, *work), spent_s=_spent(job, claim, spent_s))

    def record_crash(self, claim: Claim, why: str, spent_s: float) -> Claim | None:
        """Record that a solver's process ended on its own.

        Returns the claim of another attempt, which goes on from the best schedule, or None if there have been too many
        crashes. Raises `LostError`.
        """
        with self._locked(claim) as (db, job):
            add_log_line(db, claim.job_id, claim.attempt, why, "error")
            again = job.crashes < MOST_CRASHES
            spent = _spent(job, claim, spent_s)
            update_job(
                db, job, crashes=job.crashes + 1, spent_s=spent, **({"attempt": job.attempt + 1} if again else {})
            )
            work = problem_and_last_incumbent(db, job)
        return replace(_claim(job, job.attempt + 1, *work), spent_s=spent) if again else None

    def finish(self, claim: Claim, state: State, result: Result, spent_s: float) -> bool:
        """End a job; return False if it goes on, with another problem or more time. Raises `LostError`.

        A job that has a schedule for its problem is `done` unless it was cancelled, and what is stored of it never gets
        worse. More time matters only if the time limit ended the search: for a job that is `done` without a proof, or
        failed without a schedule.
        """
        with self._locked(claim) as (db, job):
            more_time = (
                options_of(job).time_limit_s > claim.options.time_limit_s
                and state in ("done", "failed")
                and result.status != "optimal"
            )
            if job.problem_version != claim.problem_version or (more_time and not job.cancel_requested):
                return False
            last = last_figures(db, job)
            best = last and last.value_ms
            if best is None:  # what is not stored does not count
                result = replace(result, schedule=None, status="infeasible" if state == "infeasible" else "unknown")
            elif state != "cancelled":
                state = "done"
            reason = storable_text(result.reason) if result.reason else None
            over = {**end_values(state, reason), "spent_s": spent_s}
            if best is not None and (result.value_ms is None or raises(result.value_ms, best)):  # that one stands
                update_job(db, job, **over)
            else:
                update_best(db, job, result, **over)
            add_log_line(db, claim.job_id, claim.attempt, f"ended: {state}" + (f", {reason}" if reason else ""))
            return True

    def give_back(self, claim: Claim, spent_s: float) -> None:
        """Let the job wait again, for another worker or for the next start of this one. Raises `LostError`."""
        with self._locked(claim) as (db, job):
            add_log_line(db, claim.job_id, claim.attempt, f"given back by {self._worker}")
            if job.cancel_requested:
                update_job(db, job, **end_values("cancelled", CANCELLED))
            else:
                update_job(db, job, state="queued", spent_s=_spent(job, claim, spent_s), worker=None, lease_until=None)

    @contextmanager
    def _locked(self, claim: Claim) -> Iterator[tuple[Connection, Row[Any]]]:
        with self._database.write() as db:
            job = db.execute(
                select(jobs).where(*_fence(claim), jobs.c.worker == self._worker).with_for_update()
            ).one_or_none()
            if job is None:
                raise LostError(claim.job_id)
            yield db, job


def _fence(claim: Claim) -> tuple[Any, ...]:
    return jobs.c.id == claim.job_id, jobs.c.attempt == claim.attempt, jobs.c.state == "running"


def _spent(job: Row[Any], claim: Claim, spent_s: float) -> float:
    """Seconds spent on the job's current problem: those spent on another one do not count."""
    return spent_s if job.problem_version == claim.problem_version else job.spent_s


def _claim(job: Row[Any], attempt: int, problem_text: str, last: Row[Any] | None) -> Claim:
    problem = Problem.model_validate_json(problem_text)
    return Claim(
        job_id=job.id,
        number=job.number,
        attempt=attempt,
        problem=problem,
        problem_version=job.problem_version,
        options=options_of(job),
        spent_s=job.spent_s,
        best=_read(last, problem) if last else None,
        best_version=last.problem_version if last else 0,
        lower_bound_ms=job.lower_bound_ms,
    )


def _read(incumbent: Row[Any], problem: Problem) -> Schedule | None:
    """The incumbent's schedule for the problem; None if its ops do not exist in that problem."""
    try:
        return Programs.model_validate_json(incumbent.programs).schedule(problem, incumbent.method)
    except InputError:
        return None
