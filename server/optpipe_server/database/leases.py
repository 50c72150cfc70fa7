"""`Leases`: what workers ask of the database. A claim is a lease with an attempt number, and every write of its holder
is fenced by it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Row, case, select, update

from optpipe.anytime import Result
from optpipe.errors import InputError
from optpipe.evaluate.objective import Objective
from optpipe.model.problem import Problem
from optpipe.process.protocol import Programs
from optpipe.schedule import Schedule
from optpipe_server.database.engine import Database, clock_s, now
from optpipe_server.database.incumbents import append, best_ms, change, known, note, plain, state_of_work, written
from optpipe_server.database.jobs import CANCELLED
from optpipe_server.database.tables import Level, State, jobs
from optpipe_server.settings import Settings

FOUND = ("feasible", "optimal")  # the status of a job that has a schedule
ROUNDING = 1e-9
LONGEST_S = 60.0  # of leases
MOST_CRASHES = 1  # of solver processes, after which a job goes on once more
MOST_LOSSES = 5  # of workers: a job that takes its worker down each time ends at last


class LostError(Exception):
    """The lease is another's, or the job is over or purged: nothing was written, and there is nothing left to do."""


@dataclass(frozen=True)
class Claim:
    """A job in the hands of one worker, and where it goes on."""

    job_id: str
    number: int
    tenant: str
    attempt: int
    problem: Problem
    problem_version: int
    method: str
    objective: Objective
    gap: float  # the search ends at this gap
    time_limit_s: float
    spent_s: float
    best: Schedule | None  # re-timed for `problem`; not checked on it unless `best_version` is the problem's
    best_version: int  # of the problem that `best` was found for
    lower_bound_ms: float | None  # of this problem
    crashes: int


@dataclass(frozen=True)
class Orders:
    """What the client wants of a job that runs."""

    cancelled: bool
    problem_version: int


class Leases:
    """The leases of one worker process, which is known to the others by its name."""

    def __init__(self, database: Database, worker: str, lease_s: float = Settings.lease_s) -> None:
        self._database, self._worker, self._lease_s = database, worker, lease_s

    def claim(self) -> Claim | None:
        """The waiting job of the highest priority, the oldest of these, is this worker's now; None where nothing
        waits."""
        with self._database.write() as db:
            waiting = (
                select(jobs).where(jobs.c.state == "queued").order_by(jobs.c.priority.desc(), jobs.c.number).limit(1)
            )
            job = db.execute(waiting.with_for_update(skip_locked=True)).one_or_none()
            if job is None:
                return None
            change(
                db,
                job,
                state="running",
                attempt=job.attempt + 1,
                worker=self._worker,
                lease_until=clock_s() + self._lease_s,
                started_at=job.started_at or now(),
            )
            note(db, job.id, job.attempt + 1, f"taken by {self._worker}")
            work = state_of_work(db, job)
        return _claim(job, job.attempt + 1, *work)

    def beat(self, spent_s: Iterable[tuple[Claim, float]]) -> set[str]:
        """Renews the leases of these claims, with the seconds spent; returns the ids of jobs that are this worker's no
        more."""
        lost = set()
        for claim, spent in spent_s:
            same = jobs.c.problem_version == claim.problem_version  # another problem's time counts anew
            values = {"lease_until": clock_s() + self._lease_s, "spent_s": case((same, spent), else_=jobs.c.spent_s)}
            with self._database.write() as db:
                if db.execute(update(jobs).where(*_fence(claim)).values(values)).rowcount == 0:
                    lost.add(claim.job_id)
        return lost

    def orders(self, attempts: Mapping[str, int]) -> dict[str, Orders]:
        """What is wanted of these jobs (id -> attempt); one that is not there is this worker's no more."""
        columns = jobs.c.id, jobs.c.attempt, jobs.c.cancel_requested, jobs.c.problem_version
        with self._database.read() as db:
            rows = db.execute(select(*columns).where(jobs.c.id.in_(list(attempts)), jobs.c.state == "running")).all()
        return {
            row.id: Orders(row.cancel_requested, row.problem_version) for row in rows if row.attempt == attempts[row.id]
        }

    def append(self, claim: Claim, result: Result) -> bool:
        """Commits a verified schedule, unless it is no better than the last one; said again it changes nothing.

        False where the job has another problem by now. Raises `LostError`.
        """
        row = written(result, "solver")
        with self._held(claim) as (db, job):
            if job.problem_version != claim.problem_version:
                return False
            append(db, job, result, row, claim.attempt)
            return True

    def note(self, claim: Claim, text: str, level: Level = "info") -> None:
        """A line of the job's log. Raises `LostError`."""
        with self._held(claim) as (db, _job):
            note(db, claim.job_id, claim.attempt, text, level)

    def again(self, claim: Claim, spent_s: float) -> Claim:
        """The claim as the job is now: with another problem, more time, its best schedule. Raises `LostError`."""
        with self._held(claim) as (db, job):
            work = state_of_work(db, job)
        return replace(_claim(job, claim.attempt, *work), spent_s=_spent(job, claim, spent_s))

    def crashed(self, claim: Claim, why: str, spent_s: float) -> Claim | None:
        """A solver's process ended on its own: the job goes on once more, as another attempt from its best, then None.

        Raises `LostError`.
        """
        with self._held(claim) as (db, job):
            note(db, claim.job_id, claim.attempt, why, "error")
            again = job.crashes < MOST_CRASHES
            spent = _spent(job, claim, spent_s)
            change(db, job, crashes=job.crashes + 1, spent_s=spent, **({"attempt": job.attempt + 1} if again else {}))
            work = state_of_work(db, job)
        return replace(_claim(job, job.attempt + 1, *work), spent_s=spent, crashes=job.crashes + 1) if again else None

    def finish(self, claim: Claim, state: State, result: Result, spent_s: float) -> bool:
        """The end of a job; False where it has another problem or more time by now and goes on. Raises `LostError`.

        A job that has a schedule for its problem is `done`, unless it was cancelled, and what was stored of it never
        becomes less. More time counts where the time was what ended it: for one that is `done` without a proof, or
        failed without a schedule.
        """
        with self._held(claim) as (db, job):
            more_time = (
                job.time_limit_s > claim.time_limit_s and state in ("done", "failed") and result.status != "optimal"
            )
            if job.problem_version != claim.problem_version or (more_time and not job.cancel_requested):
                return False
            best = best_ms(db, job)
            if best is None:  # what is not stored is not known
                result = replace(result, schedule=None, status="infeasible" if state == "infeasible" else "unknown")
            elif state != "cancelled":
                state = "done"
            reason = plain(result.reason) if result.reason else None
            over = {
                "state": state,
                "reason": reason,
                "spent_s": spent_s,
                "ended_at": now(),
                "worker": None,
                "lease_until": None,
            }
            stands = best is not None and (result.objective_ms is None or result.objective_ms > best * (1 + ROUNDING))
            change(db, job, **over, **({} if stands else known(result, job.lower_bound_ms)))
            note(db, claim.job_id, claim.attempt, f"ended: {state}" + (f", {reason}" if reason else ""))
            return True

    def give_back(self, claim: Claim, spent_s: float) -> None:
        """The job waits again, for another worker or this one's next start. Raises `LostError`."""
        with self._held(claim) as (db, job):
            note(db, claim.job_id, claim.attempt, f"given back by {self._worker}")
            if job.cancel_requested:
                change(db, job, state="cancelled", reason=CANCELLED, ended_at=now(), worker=None, lease_until=None)
            else:
                change(db, job, state="queued", spent_s=_spent(job, claim, spent_s), worker=None, lease_until=None)

    @contextmanager
    def _held(self, claim: Claim) -> Iterator[tuple[Connection, Row[Any]]]:
        with self._database.write() as db:
            job = db.execute(
                select(jobs).where(*_fence(claim), jobs.c.worker == self._worker).with_for_update()
            ).one_or_none()
            if job is None:
                raise LostError(claim.job_id)
            yield db, job


def reap(database: Database, everything: bool = False, but: Collection[str] = ()) -> list[str]:
    """Jobs whose worker is gone wait again, or end with what they have; returns their ids. Any process may do it at any
    time, for all `but` those that it works on itself.

    `everything` takes every running job for abandoned, whatever its lease: for the one process of a SQLite file that
    has just started.
    """
    reaped = []
    running = jobs.c.state == "running"
    with database.write() as db:
        # A lease that is longer than any: the database's clock was set back, and who is gone would keep the job until
        # it is as late again.
        db.execute(
            update(jobs)
            .where(running, jobs.c.lease_until > clock_s() + LONGEST_S)
            .values(lease_until=clock_s() + LONGEST_S)
        )
        gone = running if everything else running & (jobs.c.lease_until < clock_s())
        for job in db.execute(select(jobs).where(gone, jobs.c.id.not_in(but)).with_for_update(skip_locked=True)).all():
            reaped.append(job.id)
            note(db, job.id, job.attempt, f"its worker {job.worker} is gone", "warning")
            values: dict[str, Any] = {"worker": None, "lease_until": None, "losses": job.losses + 1}
            if job.cancel_requested:
                change(db, job, state="cancelled", reason=CANCELLED, ended_at=now(), **values)
            elif job.losses < MOST_LOSSES:
                change(db, job, state="queued", **values)
            else:
                reason = f"its worker was lost {job.losses + 1} times"
                note(db, job.id, job.attempt, reason, "error")
                change(
                    db, job, state="done" if job.status in FOUND else "failed", reason=reason, ended_at=now(), **values
                )
    return reaped


def _fence(claim: Claim) -> tuple[Any, ...]:
    return jobs.c.id == claim.job_id, jobs.c.attempt == claim.attempt, jobs.c.state == "running"


def _spent(job: Row[Any], claim: Claim, spent_s: float) -> float:
    """Of the present problem's time: what was spent on another one does not count."""
    return spent_s if job.problem_version == claim.problem_version else job.spent_s


def _claim(job: Row[Any], attempt: int, problem_text: str, last: Row[Any] | None) -> Claim:
    problem = Problem.model_validate_json(problem_text)
    return Claim(
        job_id=job.id,
        number=job.number,
        tenant=job.tenant,
        attempt=attempt,
        problem=problem,
        problem_version=job.problem_version,
        method=job.method,
        objective=job.objective,
        gap=job.gap_limit,
        time_limit_s=job.time_limit_s,
        spent_s=job.spent_s,
        best=_read(last, problem) if last else None,
        best_version=last.problem_version if last else 0,
        lower_bound_ms=job.lower_bound_ms,
        crashes=job.crashes,
    )


def _read(incumbent: Row[Any], problem: Problem) -> Schedule | None:
    """The incumbent's schedule for the problem; None where its ops mean nothing for it."""
    try:
        return Programs.model_validate_json(incumbent.programs).schedule(problem, incumbent.method)
    except InputError:
        return None
