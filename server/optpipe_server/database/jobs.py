"""`Jobs`: what clients ask of the database. Each method is one transaction; what has returned is on the disk."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from sqlalchemy import ColumnElement, Connection, Row, bindparam, delete, func, insert, select, text

from optpipe.anytime import Result
from optpipe.evaluate.objective import Objective
from optpipe.model.problem import Problem
from optpipe_server.database.engine import Database, now
from optpipe_server.database.incumbents import append, change, known, note, plain, problem_text, written
from optpipe_server.database.tables import OPEN, Source, State, adoptions, idempotency, incumbents, jobs, log, problems

MOST_LISTED = 200


class ConflictError(Exception):
    """What was asked contradicts the state of the job, or what was asked before under the same key; a sentence."""


class QueueFullError(Exception):
    """The tenant has as many waiting jobs as it may."""


class StaleError(Exception):
    """The job has changed since the version that the client has seen."""


@dataclass(frozen=True)
class NewJob:
    """What a submission asks for, once it has been read."""

    problem: Problem
    method: str = "auto"
    objective: Objective = "makespan"
    time_limit_s: float = 60.0
    gap: float = 0.0
    priority: int = 0


@dataclass(frozen=True)
class Start:
    """What is known of a problem before any worker: the best schedule, its bound, and where it is from."""

    best: Result = field(default_factory=lambda: Result("unknown"))
    source: Source = "heuristic"

    @property
    def state(self) -> State:
        """Proven answers need no worker."""
        if self.best.status == "infeasible":
            return "infeasible"
        return "done" if self.best.status == "optimal" else "queued"


class Jobs:
    """Jobs of all tenants. A method that takes the tenant that asks sees its jobs alone; the others are for whom has
    asked one of these."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def submitted(self, tenant: str, key: str, body_sha256: str) -> str | None:
        """The job that was submitted under this idempotency key; `ConflictError` where that was another body."""
        with self._database.read() as db:
            return _submitted(db, tenant, key, body_sha256)

    def add(
        self,
        tenant: str,
        job: NewJob,
        start: Start,
        *,
        queue: int,
        key: str | None = None,
        body_sha256: str = "",
        at: str | None = None,
    ) -> tuple[str, bool]:
        """Stores a job with its first incumbent; returns its id, and whether it is new: the same key and body mean the
        same job.

        Raises `QueueFullError` where `queue` jobs of the tenant wait, `ConflictError` for a key that came with another
        body.
        """
        job_id = uuid4().hex
        posed = {"job": job_id, "version": 1, "problem": problem_text(job.problem), "sha256": job.problem.sha256}
        first = written(start.best, start.source) if start.best.schedule is not None else None
        with self._database.write() as db:
            self._one_at_a_time(db, tenant)
            if key is not None and (known_id := _submitted(db, tenant, key, body_sha256)):
                return known_id, False
            state, at = start.state, at or now()
            if state == "queued" and _count(db, tenant, "queued") >= queue:
                raise QueueFullError
            row = dict(
                id=job_id,
                tenant=tenant,
                state=state,
                reason=_reason(start),
                problem_name=plain(job.problem.name),
                problem_sha256=job.problem.sha256,
                method=job.method,
                objective=job.objective,
                time_limit_s=job.time_limit_s,
                gap_limit=job.gap,
                priority=job.priority,
                last_seq=1 if first else 0,
                created_at=at,
                ended_at=None if state == "queued" else at,
                **known(start.best),
            )
            with self._database.together(db):
                db.execute(
                    _NEW_JOB, row
                )  # values apart from the statement, which is then the same every time and costs little
                db.execute(insert(problems), {**posed, "created_at": at})
                if key is not None:
                    db.execute(
                        insert(idempotency), {"tenant": tenant, "key": key, "body_sha256": body_sha256, "job": job_id}
                    )
                note(db, job_id, 0, f"submitted: {job.method}, {job.objective}, {job.time_limit_s:g} s")
                if first is not None:
                    db.execute(
                        insert(incumbents),
                        {"job": job_id, "seq": 1, "problem_version": 1, "attempt": 0, "found_at": at, **first},
                    )
        return job_id, True

    def _one_at_a_time(self, db: Connection, tenant: str) -> None:
        """A tenant's submissions take turns, so that no two of them pass the last free place or the same key at
        once."""
        if not self._database.sqlite:  # which lets one writer in at a time
            db.execute(_TURN, {"tenant": tenant})

    def job(self, tenant: str, job_id: str) -> Row[Any] | None:
        """A job with the problem that counts, as `problem`."""
        with self._database.read() as db:
            return db.execute(_POSED, {"job": job_id, "tenant": tenant}).one_or_none()

    def head(self, tenant: str, job_id: str) -> Row[Any] | None:
        """A job without its problem."""
        with self._database.read() as db:
            return db.execute(_HEAD, {"job": job_id, "tenant": tenant}).one_or_none()

    def shown(self, tenant: str, job_id: str) -> tuple[Row[Any] | None, Any]:
        """A job without its problem, and its last `incumbent` or None, both of the same moment."""
        with self._database.read() as db:
            job = db.execute(_SHOWN, {"job": job_id, "tenant": tenant}).one_or_none()
        if job is None or not job.last_seq:
            return job, None
        return job, SimpleNamespace(
            **{column.name: job._mapping[f"{_LAST}{column.name}"] for column in _WHOLE.selected_columns}
        )

    def news(self, job_id: str, after: int) -> tuple[Row[Any] | None, Sequence[Row[Any]]]:
        """A job, whoever's it is, and its incumbents numbered above `after` without their programs; of those that it
        says there are, none is missing."""
        with self._database.read() as db:
            job = db.execute(select(jobs).where(jobs.c.id == job_id)).one_or_none()
        return job, self.incumbents(job_id, after) if job and job.last_seq > after else ()

    def page(self, tenant: str, state: State | None, before: int | None, limit: int) -> Sequence[Row[Any]]:
        """The newest jobs, `limit` at most, without their problems; those submitted before the job of number
        `before`."""
        query = select(jobs).where(jobs.c.tenant == tenant)
        if state is not None:
            query = query.where(jobs.c.state == state)
        if before is not None:
            query = query.where(jobs.c.number < before)
        with self._database.read() as db:
            return db.execute(query.order_by(jobs.c.number.desc()).limit(limit)).all()

    def incumbents(self, job_id: str, after: int = 0) -> Sequence[Row[Any]]:
        """The incumbents numbered above `after`, in order, each with its adoption, without their programs."""
        with self._database.read() as db:
            return db.execute(_LISTED, {"job": job_id, "after": after}).all()

    def incumbent(self, job_id: str, seq: int) -> Row[Any] | None:
        """One incumbent with its programs and the problem it is for."""
        with self._database.read() as db:
            return db.execute(_WHOLE, {"job": job_id, "seq": seq}).one_or_none()

    def versions(self, job_ids: Collection[str]) -> dict[str, int]:
        """The versions of these jobs; one that is not there has been purged."""
        with self._database.read() as db:
            return {
                row.id: row.version
                for row in db.execute(select(jobs.c.id, jobs.c.version).where(jobs.c.id.in_(job_ids)))
            }

    def log(self, job_id: str, after: int, limit: int) -> Sequence[Row[Any]]:
        """The lines of the job's log numbered above `after`, oldest first."""
        with self._database.read() as db:
            return db.execute(
                select(log).where(log.c.job == job_id, log.c.number > after).order_by(log.c.number).limit(limit)
            ).all()

    def cancel(self, tenant: str, job_id: str) -> None:
        """A waiting job is over at once; a running one as soon as its worker hears of it; one that is over stays what
        it is."""
        with self._database.write() as db:
            job = _held(db, tenant, job_id)
            if job.state == "queued":
                change(db, job, state="cancelled", cancel_requested=True, reason=CANCELLED, ended_at=now())
                note(db, job_id, job.attempt, "cancelled while it waited")
            elif job.state == "running" and not job.cancel_requested:
                change(db, job, cancel_requested=True)
                note(db, job_id, job.attempt, "to be cancelled")

    def extend(self, tenant: str, job_id: str, time_limit_s: float, if_version: int) -> None:
        """More time for an open job. Raises `StaleError`, or `ConflictError` where it is over or has as much
        already."""
        with self._database.write() as db:
            job = _held(db, tenant, job_id)
            if job.version != if_version:
                raise StaleError
            if job.state not in OPEN:
                raise ConflictError(f"The job is over ({job.state}); submit it again.")
            if time_limit_s <= job.time_limit_s:
                raise ConflictError(
                    f"time_limit_s = {time_limit_s:g}: the job has {job.time_limit_s:g} s already; more would be right."
                )
            change(db, job, time_limit_s=time_limit_s)
            note(db, job_id, job.attempt, f"its time limit is {time_limit_s:g} s now")

    def pose(self, tenant: str, job_id: str, problem: Problem, start: Start, *, seen: int, queue: int) -> None:
        """The job goes on with another problem, such as drifted costs, from the given start; its whole time limit
        counts anew.

        `seen` is the last incumbent that the start was made from. Raises `ConflictError` for a cancelled job,
        `StaleError` where another incumbent came in between, `QueueFullError` where a job that was over finds no place
        to wait.
        """
        posed = problem_text(problem)
        first = written(start.best, start.source) if start.best.schedule is not None else None
        with self._database.write() as db:
            self._one_at_a_time(db, tenant)
            job = _held(db, tenant, job_id)
            if is_cancelled(job):
                raise ConflictError(GONE_ON)
            if job.last_seq != seen:
                raise StaleError
            state = start.state
            if state == "queued" and job.state == "running":
                state = "running"  # its worker hears of the new problem and goes on
            elif state == "queued" and job.state != "queued" and _count(db, tenant, "queued") >= queue:
                raise QueueFullError
            version, at = job.problem_version + 1, now()
            db.execute(
                insert(problems).values(
                    job=job_id, version=version, problem=posed, sha256=problem.sha256, created_at=at
                )
            )
            change(
                db,
                job,
                state=state,
                reason=_reason(start),
                problem_version=version,
                problem_name=plain(problem.name),
                problem_sha256=problem.sha256,
                cancel_requested=False,  # of one that was over before it heard of it
                spent_s=0.0,
                crashes=0,
                losses=0,
                ended_at=None if state in OPEN else at,
                **({} if state == "running" else {"worker": None, "lease_until": None}),
                **known(start.best),
            )
            note(db, job_id, job.attempt, f"problem {version}: the costs have changed")
            if first is not None:
                append(db, _held(db, tenant, job_id), start.best, first, 0)

    def adopt(self, tenant: str, job_id: str, seq: int, step: int, measured_iteration_ms: float | None) -> None:
        """What the training swapped in; said again it replaces what was said. Raises `LookupError` where there is no
        such incumbent."""
        with self._database.write() as db:
            job = _held(db, tenant, job_id)
            if not 1 <= seq <= job.last_seq:
                raise LookupError
            db.execute(delete(adoptions).where(adoptions.c.job == job_id, adoptions.c.seq == seq))
            values = {"step": step, "measured_iteration_ms": measured_iteration_ms, "adopted_at": now()}
            db.execute(insert(adoptions).values(job=job_id, seq=seq, **values))
            change(db, job)
            measured = "" if measured_iteration_ms is None else f", measured {measured_iteration_ms:g} ms"
            note(db, job_id, job.attempt, f"incumbent {seq} was adopted at step {step}{measured}")

    def purge(self, tenant: str, job_id: str) -> None:
        """The job and all that belongs to it; a worker that has it finds its lease gone."""
        with self._database.write() as db:
            db.execute(delete(jobs).where(jobs.c.id == _held(db, tenant, job_id).id))

    def count(self) -> dict[State, int]:
        """How many jobs of all tenants there are in each state."""
        with self._database.read() as db:
            return {
                row.state: row.n
                for row in db.execute(select(jobs.c.state, func.count().label("n")).group_by(jobs.c.state))
            }


CANCELLED = "the job was cancelled"
GONE_ON = "The job is cancelled; submit the problem as another job."


def is_cancelled(job: Row[Any]) -> bool:
    """Whether it is, or will be as soon as its worker hears of it; not where the job's end came first."""
    return job.state == "cancelled" or (job.cancel_requested and job.state in OPEN)


_LAST = "of_last_"  # what begins the names of an incumbent's columns beside those of its job
_SHORT: list[ColumnElement[Any]] = [column for column in incumbents.c if column.name != "programs"]
_SHORT += [
    adoptions.c.step,
    adoptions.c.measured_iteration_ms,
    adoptions.c.adopted_at,
    problems.c.sha256.label("problem_sha256"),
]
_OF_PROBLEM = (problems.c.job == incumbents.c.job) & (problems.c.version == incumbents.c.problem_version)
_OF_ADOPTION = (adoptions.c.job == incumbents.c.job) & (adoptions.c.seq == incumbents.c.seq)


def _incumbents(*more: Any) -> Any:
    """Incumbents without their programs, each with its adoption and its problem's hash, and `more` columns."""
    joined = incumbents.join(problems, _OF_PROBLEM).outerjoin(adoptions, _OF_ADOPTION)
    return select(*_SHORT, *more).select_from(joined).where(incumbents.c.job == bindparam("job"))


# Statements that are asked for often, made once: making one costs more than asking it.
_TURN = text("select pg_advisory_xact_lock(hashtextextended(:tenant, 0))")
_NEW_JOB = insert(jobs).inline()  # its number is not asked for
_HEAD = select(jobs).where(jobs.c.id == bindparam("job"), jobs.c.tenant == bindparam("tenant"))
_POSED = (
    select(jobs, problems.c.problem)
    .select_from(jobs.join(problems, (problems.c.job == jobs.c.id) & (problems.c.version == jobs.c.problem_version)))
    .where(jobs.c.id == bindparam("job"), jobs.c.tenant == bindparam("tenant"))
)
_LISTED = _incumbents().where(incumbents.c.seq > bindparam("after")).order_by(incumbents.c.seq)
_WHOLE = _incumbents(incumbents.c.programs, problems.c.problem).where(incumbents.c.seq == bindparam("seq"))
_SHOWN = (
    select(jobs, *(column.label(f"{_LAST}{column.name}") for column in _WHOLE.selected_columns))
    .select_from(
        jobs.outerjoin(incumbents, (incumbents.c.job == jobs.c.id) & (incumbents.c.seq == jobs.c.last_seq))
        .outerjoin(problems, _OF_PROBLEM)
        .outerjoin(adoptions, _OF_ADOPTION)
    )
    .where(jobs.c.id == bindparam("job"), jobs.c.tenant == bindparam("tenant"))
)


def _held(db: Connection, tenant: str, job_id: str) -> Row[Any]:
    """The job, which nobody else changes until this transaction ends. Raises `LookupError` where the tenant has none of
    that id."""
    job = db.execute(select(jobs).where(jobs.c.id == job_id, jobs.c.tenant == tenant).with_for_update()).one_or_none()
    if job is None:
        raise LookupError(job_id)
    return job


def _reason(start: Start) -> str | None:
    return plain(start.best.reason) if start.state == "infeasible" and start.best.reason else None


def _submitted(db: Connection, tenant: str, key: str, body_sha256: str) -> str | None:
    found = db.execute(
        select(idempotency).where(idempotency.c.tenant == tenant, idempotency.c.key == key)
    ).one_or_none()
    if found is None:
        return None
    if found.body_sha256 != body_sha256:
        raise ConflictError("Idempotency-Key: it came with another body before.")
    job_id: str = found.job
    return job_id


def _count(db: Connection, tenant: str, state: State) -> int:
    return db.execute(
        select(func.count()).select_from(jobs).where(jobs.c.tenant == tenant, jobs.c.state == state)
    ).scalar_one()
