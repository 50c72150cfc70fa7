"""Jobs and their incumbents in a database, by SQLAlchemy Core. Incumbents are appended and numbered from 1 per job, and never change."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import uuid4

from sqlalchemy import (
    Column,
    Connection,
    Float,
    ForeignKey,
    Integer,
    MetaData,
    Row,
    String,
    Table,
    Text,
    create_engine,
    event,
    func,
    insert,
    make_url,
    select,
    update,
)
from sqlalchemy.exc import SQLAlchemyError

from optpipe.anytime import Result
from optpipe.child import Objective, Programs
from optpipe.errors import InputError
from optpipe.problem import Problem

State = Literal["queued", "running", "done", "infeasible", "failed", "cancelled", "stopped"]
OPEN: tuple[State, ...] = ("queued", "running")  # every other state is final
Source = Literal["cache", "warm_start", "solver"]

BUSY_MS = 10_000  # how long a connection waits for another one that writes
MOST_LISTED = 200
INTERRUPTED = "the service ended while the job was not over"

_metadata = MetaData()

jobs = Table(
    "jobs",
    _metadata,
    Column("number", Integer, primary_key=True),  # the order of submission
    Column("id", String(32), unique=True, nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("reason", Text),  # why there is no schedule, or no better one
    Column("notes", Text, nullable=False, default="[]"),  # what went wrong on the way, a JSON list
    Column("problem", Text, nullable=False),  # the file's JSON
    Column("problem_name", Text, nullable=False),
    Column("problem_sha256", String(64), nullable=False),
    Column("method", Text, nullable=False),
    Column("objective", String(16), nullable=False),
    Column("time_limit_s", Float, nullable=False),
    Column("status", String(16), nullable=False, default="unknown"),  # of the best schedule
    Column("lower_bound_ms", Float),
    Column("gap", Float),
    Column("created_at", String(40), nullable=False),
    Column("started_at", String(40)),
    Column("ended_at", String(40)),
)

incumbents = Table(
    "incumbents",
    _metadata,
    Column("job", String(32), ForeignKey("jobs.id"), primary_key=True),
    Column("seq", Integer, primary_key=True),
    Column("source", String(16), nullable=False),
    Column("method", Text, nullable=False),
    Column("makespan_ms", Float, nullable=False),
    Column("span_ms", Float, nullable=False),
    Column("found_at", String(40), nullable=False),
    Column("programs", Text, nullable=False),  # `optpipe.child.Programs` as JSON
)

_SHORT = [column for column in incumbents.c if column.name != "programs"]  # what a list shows
_LISTED = [column for column in jobs.c if column.name != "problem"]


@dataclass(frozen=True)
class NewJob:
    """What a submission asks for, once it has been read."""

    problem: Problem
    method: str
    objective: Objective
    time_limit_s: float


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Store:
    """The database. Methods may be called from any thread; each is one transaction, and what has returned is on the disk.

    Raises `InputError` for a URL that cannot be used.
    """

    def __init__(self, database: str) -> None:
        try:
            url = make_url(database)
            if url.get_backend_name() != "sqlite" or not url.database:
                raise InputError(f"database = {url.render_as_string()!r}: must be sqlite:///FILE")
            self._engine = create_engine(url)
            event.listen(self._engine, "connect", _configure)
            event.listen(self._engine, "begin", _begin)
            _metadata.create_all(self._engine)
        except SQLAlchemyError as error:
            raise InputError(f"database = {database!r}: {getattr(error, 'orig', None) or error}") from None

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        with self._engine.connect().execution_options(reads_only=True) as connection:
            yield connection

    def add_job(self, job: NewJob, first: Result | None, source: Source) -> str:
        """A queued job, together with the first incumbent where there is one; returns its id."""
        job_id = uuid4().hex
        with self._engine.begin() as db:
            db.execute(
                insert(jobs).values(
                    id=job_id,
                    state="queued",
                    problem=json.dumps(job.problem.to_dict(), separators=(",", ":")),
                    problem_name=job.problem.name,
                    problem_sha256=job.problem.sha256,
                    method=job.method,
                    objective=job.objective,
                    time_limit_s=job.time_limit_s,
                    created_at=now(),
                )
            )
            if first is not None:
                _append(db, job_id, first, source)
        return job_id

    def start(self, job_id: str) -> bool:
        """From queued to running; False where it was cancelled in the meantime."""
        started = update(jobs).where(jobs.c.id == job_id, jobs.c.state == "queued").values(state="running", started_at=now())
        with self._engine.begin() as db:
            return db.execute(started).rowcount == 1

    def add_incumbent(self, job_id: str, result: Result, source: Source) -> bool:
        """Appends the result's schedule, with what is now known of the job; False where the job is over, which then stays as it is."""
        with self._engine.begin() as db:
            state = db.execute(select(jobs.c.state).where(jobs.c.id == job_id)).scalar_one()
            if state in OPEN:
                _append(db, job_id, result, source)
        return state in OPEN

    def finish(self, job_id: str, state: State, best: Result) -> bool:
        """From queued or running to a final state; False where the job had one, which stays."""
        values = {"state": state, "reason": best.reason, "notes": json.dumps(best.notes), "ended_at": now(), **_known(best)}
        with self._engine.begin() as db:
            return db.execute(update(jobs).where(jobs.c.id == job_id, jobs.c.state.in_(OPEN)).values(**values)).rowcount == 1

    def stop_open(self) -> int:
        """Every queued or running job becomes `stopped`, with its best schedule kept: nobody works on it any more. Returns how many."""
        with self._engine.begin() as db:
            return db.execute(
                update(jobs).where(jobs.c.state.in_(OPEN)).values(state="stopped", reason=INTERRUPTED, ended_at=now())
            ).rowcount

    def job(self, job_id: str) -> Row[Any] | None:
        with self._read() as db:
            return db.execute(select(jobs).where(jobs.c.id == job_id)).one_or_none()

    def jobs(self) -> Sequence[Row[Any]]:
        """The newest jobs, without their problems."""
        with self._read() as db:
            return db.execute(select(*_LISTED).order_by(jobs.c.number.desc()).limit(MOST_LISTED)).all()

    def incumbents(self, job_id: str, after: int = 0) -> Sequence[Row[Any]]:
        """The incumbents numbered above `after`, in order, without their programs."""
        with self._read() as db:
            of_job = incumbents.c.job == job_id, incumbents.c.seq > after
            return db.execute(select(*_SHORT).where(*of_job).order_by(incumbents.c.seq)).all()

    def incumbent(self, job_id: str, seq: int | None = None) -> Row[Any] | None:
        """One incumbent with its programs; the best (the last: each is better than those before it) without a number."""
        query = select(incumbents).where(incumbents.c.job == job_id)
        query = query.order_by(incumbents.c.seq.desc()).limit(1) if seq is None else query.where(incumbents.c.seq == seq)
        with self._read() as db:
            return db.execute(query).one_or_none()


def _append(db: Connection, job_id: str, result: Result, source: Source) -> None:
    schedule = result.schedule
    assert schedule is not None
    last = db.execute(select(func.max(incumbents.c.seq)).where(incumbents.c.job == job_id)).scalar_one()
    db.execute(
        insert(incumbents).values(
            job=job_id,
            seq=(last or 0) + 1,
            source=source,
            method=result.method,
            makespan_ms=schedule.makespan_ms,
            span_ms=schedule.span_ms,
            found_at=now(),
            programs=Programs.of(schedule).model_dump_json(),
        )
    )
    db.execute(update(jobs).where(jobs.c.id == job_id).values(**_known(result)))


def _known(best: Result) -> dict[str, Any]:
    return {"status": best.status, "lower_bound_ms": best.lower_bound_ms, "gap": best.gap}


def _configure(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # SQLAlchemy's BEGIN is ours, see `_begin`
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", f"busy_timeout = {BUSY_MS}"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin(connection: Connection) -> None:
    """A transaction that will write takes the lock at once, so that two of them never meet halfway."""
    reads_only = connection.get_execution_options().get("reads_only", False)
    connection.exec_driver_sql("BEGIN" if reads_only else "BEGIN IMMEDIATE")
