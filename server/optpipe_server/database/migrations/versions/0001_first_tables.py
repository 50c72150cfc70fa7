"""The first tables."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("number", NUMBER, autoincrement=True, nullable=False),
        _text("id", 32),
        _text("tenant", 64),
        sa.Column("version", sa.Integer(), nullable=False),
        _text("state", 16),
        sa.Column("reason", sa.Text()),
        sa.Column("problem_version", sa.Integer(), nullable=False),
        _text("problem_name"),
        _text("problem_sha256", 64),
        _text("options"),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        _text("status", 16),
        sa.Column("value_ms", sa.Float()),
        sa.Column("lower_bound_ms", sa.Float()),
        sa.Column("gap", sa.Float()),
        sa.Column("last_seq", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(128)),
        sa.Column("lease_until", sa.Float()),
        sa.Column("spent_s", sa.Float(), nullable=False),
        sa.Column("crashes", sa.Integer(), nullable=False),
        sa.Column("losses", sa.Integer(), nullable=False),
        _text("created_at", 40),
        sa.Column("started_at", sa.String(40)),
        sa.Column("ended_at", sa.String(40)),
        sa.PrimaryKeyConstraint("number", name="pk_jobs"),
        sa.UniqueConstraint("id", name="uq_jobs_id"),
    )
    _of_job(
        "problems",
        "version",
        sa.Column("version", sa.Integer(), nullable=False),
        _text("problem"),
        _text("sha256", 64),
        _text("created_at", 40),
    )
    _of_job(
        "incumbents",
        "seq",
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("problem_version", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        _text("source", 16),
        _text("method"),
        sa.Column("makespan_ms", sa.Float(), nullable=False),
        sa.Column("span_ms", sa.Float(), nullable=False),
        sa.Column("value_ms", sa.Float(), nullable=False),
        _text("found_at", 40),
        _text("programs"),
    )
    op.create_table(
        "bounds",
        _text("job", 32),
        sa.Column("problem_version", sa.Integer(), nullable=False),
        sa.Column("lower_bound_ms", sa.Float(), nullable=False),
        _text("found_at", 40),
        sa.PrimaryKeyConstraint("job", "problem_version", "lower_bound_ms", name="pk_bounds"),
        _job_key("bounds"),
    )
    _of_job(
        "adoptions",
        "seq",
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("measured_iteration_ms", sa.Float()),
        _text("adopted_at", 40),
    )
    op.create_table(
        "log",
        sa.Column("number", NUMBER, autoincrement=True, nullable=False),
        _text("job", 32),
        _text("at", 40),
        sa.Column("attempt", sa.Integer(), nullable=False),
        _text("level", 8),
        _text("text"),
        sa.PrimaryKeyConstraint("number", name="pk_log"),
        _job_key("log"),
    )
    op.create_table(
        "idempotency",
        _text("tenant", 64),
        _text("key", 255),
        _text("body_sha256", 64),
        _text("job", 32),
        sa.PrimaryKeyConstraint("tenant", "key", name="pk_idempotency"),
        _job_key("idempotency"),
    )
    op.create_table(
        "keys",
        _text("id", 16),
        _text("tenant", 64),
        _text("secret_sha256", 64),
        _text("scopes"),
        _text("created_at", 40),
        sa.Column("revoked_at", sa.String(40)),
        sa.PrimaryKeyConstraint("id", name="pk_keys"),
    )
    op.create_table(
        "schedules",
        _text("tenant", 64),
        _text("problem_sha256", 64),
        _text("objective", 16),
        _text("structure", 64),
        sa.Column("features", sa.LargeBinary(), nullable=False),
        sa.Column("cell", sa.BigInteger(), nullable=False),
        _text("used", 40),
        sa.Column("hits", sa.Integer(), nullable=False),
        _text("entry"),
        sa.PrimaryKeyConstraint("tenant", "problem_sha256", "objective", name="pk_schedules"),
    )
    op.create_table(
        "turns",
        _text("tenant", 64),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", name="pk_turns"),
    )
    op.create_table(
        "probes",
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        _text("text"),
        sa.PrimaryKeyConstraint("number", name="pk_probes"),
    )
    op.execute("insert into probes (number, text) values (1, '')")
    for name, table, columns in (
        ("ix_jobs_state_priority", "jobs", ["state", "priority", "number"]),
        ("ix_jobs_tenant_number", "jobs", ["tenant", "number"]),
        ("ix_jobs_tenant_state", "jobs", ["tenant", "state", "number"]),
        ("ix_log_job", "log", ["job"]),
        ("ix_idempotency_job", "idempotency", ["job"]),
        ("ix_schedules_cell", "schedules", ["tenant", "structure", "objective", "cell"]),
        ("ix_schedules_used", "schedules", ["tenant", "used"]),
    ):
        op.create_index(name, table, columns)


def downgrade() -> None:
    of_jobs = ("idempotency", "log", "adoptions", "bounds", "incumbents", "problems")
    for table in ("probes", "turns", "schedules", "keys", *of_jobs, "jobs"):
        op.drop_table(table)


def _text(name: str, length: int | None = None) -> sa.Column[str]:
    return sa.Column(name, sa.String(length) if length else sa.Text(), nullable=False)


def _job_key(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=f"fk_{table}_job", ondelete="CASCADE")


def _of_job(table: str, key: str, *columns: sa.Column[Any]) -> None:
    """Create a table whose rows belong to a job, numbered by `key`."""
    op.create_table(
        table, _text("job", 32), *columns, sa.PrimaryKeyConstraint("job", key, name=f"pk_{table}"), _job_key(table)
    )
