"""`Jobs`: what clients read of jobs, and what they do with them. Each method is one transaction; once it has returned,
its changes are on disk."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection, Row, Select, bindparam, delete, func, insert, or_, select, text, tuple_, update

from optpipe.model.problem import Problem
from optpipe.options import SolveOptions
from optpipe.results import GONE, Result
from optpipe_cache import Retention
from optpipe_server.database import changes, tables
from optpipe_server.database.changes import (
    NO_JOB,
    ConflictError,
    KeyReusedError,
    MissingError,
    StaleError,
    TooManyOpenError,
    add_log_line,
    locked,
    storable_text,
    update_job,
)
from optpipe_server.database.engine import Database, now
from optpipe_server.database.tables import OPEN, Source, State, adoptions, bounds, incumbents, jobs, log, problems

MOST_LISTED = 200
PRUNED_AT_ONCE = 100  # jobs

# The statements that run often, built once: building one costs more than running it.
_LOCK = text("select pg_advisory_xact_lock(hashtextextended('optpipe: submissions', 0))")
_NEW_JOB = insert(jobs).inline()  # does not return the number
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


@dataclass(frozen=True)
class NewJob:
    """What a submission asks for."""

    problem: Problem
    options: SolveOptions = field(default_factory=SolveOptions)
    priority: int = 0
    key_name: str | None = None
    idempotency_key: str | None = None
    body_sha256: str = ""
    lease_s: float | None = None


@dataclass(frozen=True)
class InitialResult:
    """A problem before any worker searches: the best schedule, its bound, and where it comes from."""

    best: Result = field(default_factory=lambda: Result("unknown"))
    source: Source = "heuristic"

    @property
    def row(self) -> dict[str, Any] | None:
        """The columns of the first incumbent, if there is one."""
        return changes.incumbent_values(self.best, self.source) if self.best.schedule is not None else None

    @property
    def reason(self) -> str | None:
        """Why there is no schedule, or which stages or changes were not searched, where no search follows."""
        is_last, text = self.best.status in ("infeasible", "optimal"), self.best.explanation
        return storable_text(text) if is_last and text else None

    def state(self, options: SolveOptions) -> State:
        """Return the job's first state: a proven answer needs no worker, unless the method runs nevertheless."""
        if self.best.status == "infeasible":
            return "infeasible"
        return "done" if self.best.status == "optimal" and options.ends_when_proven else "queued"


class Jobs:
    """The jobs of a database, for clients."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def job(self, job_id: str) -> Row[Any]:
        """Return a job. Raises `MissingError`."""
        if not (found := self._database.rows(_JOB, job=job_id)):
            raise MissingError(NO_JOB)
        return found[0]

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
        job = next(iter(self._database.rows(_JOB, job=job_id)), None)
        return job, self.incumbents(job_id, after) if job and job.last_seq > after else ()

    def page(self, state: State | None, before: int | None, limit: int) -> Sequence[Row[Any]]:
        """Return up to `limit` jobs without their problems, newest first, all submitted before the job of number
        `before`."""
        query = select(jobs)
        if state is not None:
            query = query.where(jobs.c.state == state)
        if before is not None:
            query = query.where(jobs.c.number < before)
        return self._database.rows(query.order_by(jobs.c.number.desc()).limit(limit))

    def incumbents(self, job_id: str, after: int = 0) -> Sequence[Row[Any]]:
        """Return the incumbents numbered above `after`, in order, each with its adoption and without its programs."""
        return self._database.rows(_INCUMBENTS, job=job_id, after=after)

    def bounds(self, job_id: str) -> Sequence[Row[Any]]:
        """Return the lower bounds of the job's problems, in order."""
        of_job = select(bounds).where(bounds.c.job == job_id)
        return self._database.rows(of_job.order_by(bounds.c.problem_version, bounds.c.lower_bound_ms))

    def incumbent(self, job_id: str, seq: int) -> Row[Any] | None:
        """Return one incumbent with its programs and its problem."""
        following = self._database.rows(_INCUMBENT, job=job_id, after=seq - 1)
        return following[0] if following and following[0].seq == seq else None

    def versions(self, job_ids: Collection[str]) -> dict[str, int]:
        """Return the versions of these jobs by id; purged jobs are missing."""
        of_jobs = select(jobs.c.id, jobs.c.version).where(jobs.c.id.in_(job_ids))
        return {row.id: row.version for row in self._database.rows(of_jobs)}

    def log(self, job_id: str, after: int, limit: int) -> Sequence[Row[Any]]:
        """Return the lines of the job's log numbered above `after`, oldest first."""
        lines = select(log).where(log.c.job == job_id, log.c.number > after).order_by(log.c.number).limit(limit)
        return self._database.rows(lines)

    def queue(self) -> tuple[Sequence[tuple[str, str | None]], int]:
        """Return the running jobs (id and worker), and how many jobs wait."""
        running = select(jobs.c.id, jobs.c.worker).where(jobs.c.state == "running").order_by(jobs.c.number)
        waiting = select(func.count()).select_from(jobs).where(jobs.c.state == "queued")
        with self._database.read() as db:
            return [(row.id, row.worker) for row in db.execute(running)], db.execute(waiting).scalar_one()

    def count(self) -> dict[State, int]:
        """Count the jobs by state."""
        by_state = select(jobs.c.state, func.count().label("n")).group_by(jobs.c.state)
        return {row.state: row.n for row in self._database.rows(by_state)}

    def submitted(self, idempotency_key: str, body_sha256: str) -> str | None:
        """Return the id of the job submitted under this idempotency key. Raises `KeyReusedError` if its body was
        another one."""
        with self._database.read() as db:
            return _submitted(db, idempotency_key, body_sha256)

    def add(self, job: NewJob, initial: InitialResult, *, most_open: int) -> tuple[str, bool]:
        """Store a job with its first incumbent, if there is one; return its id, and whether it is new.

        The same idempotency key and hash of the body mean the same job. Raises `KeyReusedError` if the key was used
        with another body, `TooManyOpenError` if `most_open` jobs of the submitter's key wait or run already.
        """
        job_id, problem_text = uuid4().hex, changes.problem_text(job.problem)
        first = initial.row  # before the transaction, which others wait for
        with self._database.write() as db:
            self._one_at_a_time(db)
            if job.idempotency_key and (former := _submitted(db, job.idempotency_key, job.body_sha256)):
                return former, False
            state, at = initial.state(job.options), now()
            if state == "queued":
                _check_open(db, job.key_name, most_open)
            # The values are apart from the statement, so that it is compiled only once.
            row = dict(
                id=job_id,
                state=state,
                reason=initial.reason,
                key_name=job.key_name,
                idempotency_key=job.idempotency_key,
                body_sha256=job.body_sha256,
                problem_name=storable_text(job.problem.name),
                problem_sha256=job.problem.sha256,
                options=job.options.model_dump_json(),
                priority=job.priority,
                last_seq=1 if first else 0,
                value_ms=first["value_ms"] if first else None,
                created_at=at,
                ended_at=None if state == "queued" else at,
                **changes.best_values(initial.best),
            )
            db.execute(_NEW_JOB, row)
            of_job = {"job": job_id, "version": 1}
            db.execute(insert(problems), {**of_job, "problem": problem_text, "sha256": job.problem.sha256})
            if job.lease_s is not None:
                db.execute(insert(tables.leases), {"job": job_id, "lease_s": job.lease_s, "renewed_at": at})
            others = job.options.model_dump(exclude_defaults=True, exclude={"method", "objective", "time_limit_s"})
            words = [job.options.method, job.options.objective, f"{job.options.time_limit_s:g} s"]
            words += [f"{name} = {value}" for name, value in others.items()]
            add_log_line(db, job_id, 0, f"submitted: {', '.join(words)}")
            if first is not None:
                numbers = {"job": job_id, "seq": 1, "problem_version": 1, "attempt": 0}
                db.execute(insert(incumbents), {**numbers, "found_at": at, **first})
            if initial.best.lower_bound_ms is not None:
                changes.add_bound(db, job_id, 1, initial.best.lower_bound_ms, at)
            if state == "queued":
                self._enqueue(db, job_id, job.priority)
        return job_id, True

    def _one_at_a_time(self, db: Connection) -> None:
        """Serialize submissions: two could both be the last that may be open, or the first with their key."""
        if not self._database.sqlite:  # SQLite has one writer at a time anyway
            db.execute(_LOCK)

    def _enqueue(self, db: Connection, job_id: str, priority: int) -> None:
        if not self._database.sqlite:  # there the table is the queue
            from optpipe_server.database.postgres import enqueue

            enqueue(db, job_id, priority)

    def cancel(self, job_id: str, why: str = changes.CANCELLED) -> None:
        """Cancel a job: at once if it waits, as soon as its worker reads that if it runs. A job that is over stays as
        it is."""
        with self._database.write() as db:
            job = locked(db, job_id)
            if job.state == "queued":
                update_job(db, job, cancel_requested=True, **changes.end_values("cancelled", why))
                add_log_line(db, job_id, job.attempt, f"cancelled while waiting: {why}")
            elif job.state == "running" and not job.cancel_requested:
                update_job(db, job, cancel_requested=True, reason=why)
                add_log_line(db, job_id, job.attempt, f"cancel requested: {why}")

    def renew(self, job_id: str) -> None:
        """Renew the job's lease, if it has one."""
        with self._database.write() as db:
            _renew(db, job_id)

    def cancel_gone(self, since: str) -> None:
        """Cancel the open jobs whose lease is over. Renewals could be read only `since` then."""
        of_open = select(tables.leases).join(jobs).where(jobs.c.state.in_(OPEN), jobs.c.cancel_requested.is_(False))
        for lease in self._database.rows(of_open):
            until = datetime.fromisoformat(max(lease.renewed_at, since)) + timedelta(seconds=lease.lease_s)
            if until < datetime.now(UTC):
                with suppress(MissingError):  # it was purged meanwhile
                    self.cancel(lease.job, GONE)

    def extend(self, job_id: str, time_limit_s: float, if_version: int) -> None:
        """Give an open job more time. Raises `StaleError` if the job's version is not `if_version`, `ConflictError` if
        it is over or has as much time already."""
        with self._database.write() as db:
            job = locked(db, job_id)
            if job.version != if_version:
                raise StaleError("If-Match: the job has changed; its ETag is another one.")
            if job.state not in OPEN:
                raise ConflictError(f"The job is over ({job.state}); submit it again.")
            options = options_of(job)
            if time_limit_s <= options.time_limit_s:
                raise ConflictError(
                    f"time_limit_s = {time_limit_s:g}: the job has {options.time_limit_s:g} s already; expected more."
                )
            longer = options.model_copy(update={"time_limit_s": time_limit_s})
            update_job(db, job, options=longer.model_dump_json())
            add_log_line(db, job_id, job.attempt, f"its time limit is {time_limit_s:g} s now")

    def change_problem(
        self, job_id: str, problem: Problem, initial: InitialResult, *, seen: int, most_open: int
    ) -> None:
        """Replace the job's problem, for example when costs have drifted; its whole time limit counts anew.

        `initial` is the best for the new problem, computed from incumbent number `seen`. Raises
        `ConflictError` if the job is cancelled, `StaleError` if it has got another incumbent since, `TooManyOpenError`
        if it was over and `most_open` jobs of its key wait or run already.
        """
        problem_text = changes.problem_text(problem)
        first = initial.row  # before the transaction, which others wait for
        with self._database.write() as db:
            self._one_at_a_time(db)
            job = locked(db, job_id)
            if is_cancelled(job):
                raise ConflictError(changes.CANCELLED_DETAIL)
            if job.last_seq != seen:
                raise StaleError
            state = initial.state(options_of(job))
            if state == "queued" and job.state not in OPEN:
                _check_open(db, job.key_name, most_open)
            if state == "queued" and job.state != "queued":  # a worker that has it ends its search
                self._enqueue(db, job_id, job.priority)
            version, at = job.problem_version + 1, now()
            row = {"job": job_id, "version": version, "problem": problem_text, "sha256": problem.sha256}
            db.execute(insert(problems), row)
            _renew(db, job_id)
            update_job(
                db,
                job,
                state=state,
                reason=initial.reason,
                problem_version=version,
                problem_name=storable_text(problem.name),
                problem_sha256=problem.sha256,
                cancel_requested=False,  # the job may have ended before its worker heard of it
                spent_s=0.0,
                crashes=0,
                losses=0,
                ended_at=None if state in OPEN else at,
                worker=None,
                value_ms=None,
                **changes.best_values(initial.best if first is None else Result("unknown")),
            )
            add_log_line(db, job_id, job.attempt, f"problem {version}: the costs have changed")
            if first is not None:
                changes.append(db, locked(db, job_id), initial.best, first, 0)
            elif initial.best.lower_bound_ms is not None:
                changes.add_bound(db, job_id, version, initial.best.lower_bound_ms, at)

    def adopt(self, job_id: str, seq: int, step: int, measured_iteration_ms: float | None) -> None:
        """Record that the training has swapped an incumbent in; recorded again, it replaces the former record.

        Raises `MissingError` if there is no such incumbent.
        """
        with self._database.write() as db:
            job = locked(db, job_id)
            if not 1 <= seq <= job.last_seq:
                raise MissingError(changes.NO_INCUMBENT)
            db.execute(delete(adoptions).where(adoptions.c.job == job_id, adoptions.c.seq == seq))
            values = {"step": step, "measured_iteration_ms": measured_iteration_ms, "adopted_at": now()}
            db.execute(insert(adoptions).values(job=job_id, seq=seq, **values))
            update_job(db, job)
            measured = "" if measured_iteration_ms is None else f", measured {measured_iteration_ms:g} ms"
            add_log_line(db, job_id, job.attempt, f"incumbent {seq} was adopted at step {step}{measured}")

    def purge(self, job_id: str) -> None:
        """Delete the job and all that belongs to it. A worker that has it ends its search."""
        with self._database.write() as db:
            db.execute(delete(jobs).where(jobs.c.id == locked(db, job_id).id))


def _renew(db: Connection, job_id: str) -> None:
    db.execute(update(tables.leases).where(tables.leases.c.job == job_id).values(renewed_at=now()))


def options_of(job: Row[Any]) -> SolveOptions:
    """Return the options that a job was submitted with."""
    return SolveOptions.model_validate_json(job.options)


def is_over(job: Row[Any]) -> bool:
    """Return whether the job is neither waiting nor running."""
    return job.state not in OPEN


def is_best(job: Row[Any], last: Row[Any]) -> bool:
    """Return whether this incumbent is the job's last one, and one for its current problem."""
    return last.seq == job.last_seq and bool(last.problem_version == job.problem_version)


def is_cancelled(job: Row[Any]) -> bool:
    """Return whether the job is cancelled, or will be as soon as its worker reads that."""
    return job.state == "cancelled" or (job.cancel_requested and job.state in OPEN)


def _submitted(db: Connection, idempotency_key: str, body_sha256: str) -> str | None:
    of_key = select(jobs.c.id, jobs.c.body_sha256).where(jobs.c.idempotency_key == idempotency_key)
    former = db.execute(of_key).one_or_none()
    if former is not None and former.body_sha256 != body_sha256:
        raise KeyReusedError("Idempotency-Key: it was used with another body before.")
    return former.id if former is not None else None


def _check_open(db: Connection, key_name: str | None, most: int) -> None:
    """Raise `TooManyOpenError` if so many jobs of the key are open already."""
    of_key = jobs.c.key_name.is_not_distinct_from(key_name), jobs.c.state.in_(OPEN)
    if db.execute(select(func.count()).select_from(jobs).where(*of_key)).scalar_one() >= most:
        raise TooManyOpenError(f"{most} jobs of {'this key' if key_name else 'yours'} wait or run already.")


def prune(database: Database, kept: Retention) -> int:
    """Delete jobs that are over and not kept; return how many were deleted, at most so many at once."""
    last = func.row_number().over(order_by=(jobs.c.ended_at.desc(), jobs.c.number.desc()))
    over = select(jobs.c.number, jobs.c.ended_at, last.label("place")).where(jobs.c.ended_at.is_not(None)).subquery()
    not_kept = or_(over.c.place > kept.most, over.c.ended_at < kept.since)
    old = database.rows(select(over.c.number, over.c.ended_at).where(not_kept).limit(PRUNED_AT_ONCE))
    if not old:
        return 0
    with database.write() as db:  # not those that go on or have ended again meanwhile
        unchanged = tuple_(jobs.c.number, jobs.c.ended_at).in_([tuple(row) for row in old])
        return db.execute(delete(jobs).where(unchanged)).rowcount
