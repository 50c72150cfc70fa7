"""The tables, for SQLite and PostgreSQL alike. Times are ISO text in UTC."""

from __future__ import annotations

from typing import Literal

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

State = Literal["queued", "running", "done", "infeasible", "failed", "cancelled"]
# The other states are final, unless the job gets another problem.
OPEN: tuple[State, ...] = ("queued", "running")
Source = Literal["cache", "warm_start", "heuristic", "carried", "solver"]
Level = Literal["info", "warning", "error"]

metadata = MetaData()
_Number = BigInteger().with_variant(Integer, "sqlite")  # SQLite has autoincrement for INTEGER only

jobs = Table(
    "jobs",
    metadata,
    Column("number", _Number, primary_key=True, autoincrement=True),  # the order of submission
    Column("id", String(32), unique=True, nullable=False),
    Column("version", Integer, nullable=False, default=1),  # grows with every visible change: the ETag
    Column("state", String(16), nullable=False),
    Column("reason", Text),  # why there is no schedule, or no better one
    # What was requested, and by whom.
    Column("key_name", String(64)),  # of the key that submitted it; null without keys
    Column("idempotency_key", String(255), unique=True),
    Column("body_sha256", String(64), nullable=False),  # of the submission
    Column("problem_version", Integer, nullable=False, default=1),  # the current row of `problems`
    Column("problem_name", Text, nullable=False),
    Column("problem_sha256", String(64), nullable=False),
    Column("options", Text, nullable=False),  # `optpipe.options.SolveOptions` as JSON
    Column("priority", Integer, nullable=False),
    Column("cancel_requested", Boolean, nullable=False, default=False),
    # The current problem's best schedule and bound.
    Column("status", String(16), nullable=False, default="unknown"),  # of the best schedule
    Column("value_ms", Float),  # of its last incumbent: what the search minimizes
    Column("lower_bound_ms", Float),
    Column("gap", Float),
    Column("last_seq", Integer, nullable=False, default=0),  # number of the last incumbent
    # Its worker.
    Column("attempt", Integer, nullable=False, default=0),  # grows with each worker; what former ones write is refused
    Column("worker", String(128)),
    Column("spent_s", Float, nullable=False, default=0.0),  # of the time limit, on the current problem
    Column("crashes", Integer, nullable=False, default=0),  # of solver processes
    Column("losses", Integer, nullable=False, default=0),  # of workers
    Column("created_at", String(40), nullable=False),
    Column("started_at", String(40)),
    Column("ended_at", String(40)),
    Index("ix_jobs_state_priority", "state", "priority", "number"),
)


leases = Table(  # of jobs that end with their client
    "leases",
    metadata,
    Column("job", String(32), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("lease_s", Float, nullable=False),
    Column("renewed_at", String(40), nullable=False),
)

problems = Table(
    "problems",
    metadata,
    Column("job", String(32), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("version", Integer, primary_key=True),  # 1 as submitted, then one more with every change
    Column("problem", Text, nullable=False),  # the file's JSON
    Column("sha256", String(64), nullable=False),
)

incumbents = Table(
    "incumbents",
    metadata,
    Column("job", String(32), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    # 1, 2, ... per job; among those of one problem version each is better than the one before
    Column("seq", Integer, primary_key=True),
    Column("problem_version", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),  # 0 if before any worker
    Column("source", String(16), nullable=False),
    Column("method", Text, nullable=False),
    Column("makespan_ms", Float, nullable=False),
    Column("span_ms", Float, nullable=False),
    Column("value_ms", Float, nullable=False),  # what the search minimizes: one of them
    Column("found_at", String(40), nullable=False),
    Column("programs", Text, nullable=False),  # `optpipe.process.protocol.Programs` as JSON
)

bounds = Table(
    "bounds",
    metadata,
    Column("job", String(32), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("problem_version", Integer, primary_key=True),
    Column("lower_bound_ms", Float, primary_key=True),  # each is higher than the one before
    Column("found_at", String(40), nullable=False),
)

adoptions = Table(
    "adoptions",
    metadata,
    Column("job", String(32), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("seq", Integer, primary_key=True),
    Column("step", BigInteger, nullable=False),  # first step of the training by this schedule
    Column("measured_iteration_ms", Float),
    Column("adopted_at", String(40), nullable=False),
)

log = Table(
    "log",
    metadata,
    Column("number", _Number, primary_key=True, autoincrement=True),
    Column("job", String(32), ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("at", String(40), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("level", String(8), nullable=False),
    Column("text", Text, nullable=False),
)

probes = Table(  # one row, written again and again to see whether anything can be stored
    "probes",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("text", Text, nullable=False),
)

keys = Table(
    "keys",
    metadata,
    Column("id", String(16), primary_key=True),  # the middle of op_<id>_<secret>
    Column("name", String(64), nullable=False),
    Column("secret_sha256", String(64), nullable=False),
    Column("scopes", Text, nullable=False),  # separated by spaces
    Column("created_at", String(40), nullable=False),
    Column("revoked_at", String(40)),
)

schedules = Table(
    "schedules",
    metadata,
    Column("problem_sha256", String(64), primary_key=True),
    Column("objective", String(16), primary_key=True),
    Column("structure", String(64), nullable=False),
    Column("features", LargeBinary, nullable=False),
    Column("used", String(40), nullable=False),
    Column("hits", Integer, nullable=False),
    Column("entry", Text, nullable=False),  # `optpipe_cache.Entry` as JSON
    Index("ix_schedules_structure", "structure", "objective", "used"),
    Index("ix_schedules_used", "used"),
)
