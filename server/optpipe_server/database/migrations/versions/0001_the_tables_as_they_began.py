"""The tables as they began."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("problem_version", sa.Integer(), nullable=False),
        sa.Column("problem_name", sa.Text(), nullable=False),
        sa.Column("problem_sha256", sa.String(length=64), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("objective", sa.String(length=16), nullable=False),
        sa.Column("time_limit_s", sa.Float(), nullable=False),
        sa.Column("gap_limit", sa.Float(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("lower_bound_ms", sa.Float(), nullable=True),
        sa.Column("gap", sa.Float(), nullable=True),
        sa.Column("last_seq", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(length=128), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=True),
        sa.Column("spent_s", sa.Float(), nullable=False),
        sa.Column("crashes", sa.Integer(), nullable=False),
        sa.Column("losses", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.String(length=40), nullable=False),
        sa.Column("started_at", sa.String(length=40), nullable=True),
        sa.Column("ended_at", sa.String(length=40), nullable=True),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_jobs")),
        sa.UniqueConstraint("id", name=op.f("uq_jobs_id")),
    )
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.create_index("ix_jobs_state_priority", ["state", "priority", "number"], unique=False)
        batch_op.create_index("ix_jobs_tenant_number", ["tenant", "number"], unique=False)
        batch_op.create_index("ix_jobs_tenant_state", ["tenant", "state", "number"], unique=False)

    op.create_table(
        "keys",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("secret_sha256", sa.String(length=64), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("created_at", sa.String(length=40), nullable=False),
        sa.Column("revoked_at", sa.String(length=40), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_keys")),
    )
    op.create_table(
        "schedules",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("problem_sha256", sa.String(length=64), nullable=False),
        sa.Column("objective", sa.String(length=16), nullable=False),
        sa.Column("shape", sa.String(length=64), nullable=False),
        sa.Column("features", sa.Text(), nullable=False),
        sa.Column("added", sa.String(length=40), nullable=False),
        sa.Column("entry", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "problem_sha256", "objective", name=op.f("pk_schedules")),
    )
    with op.batch_alter_table("schedules", schema=None) as batch_op:
        batch_op.create_index("ix_schedules_shape", ["tenant", "shape", "objective"], unique=False)

    op.create_table(
        "adoptions",
        sa.Column("job", sa.String(length=32), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("measured_iteration_ms", sa.Float(), nullable=True),
        sa.Column("adopted_at", sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=op.f("fk_adoptions_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", "seq", name=op.f("pk_adoptions")),
    )
    op.create_table(
        "idempotency",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("body_sha256", sa.String(length=64), nullable=False),
        sa.Column("job", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=op.f("fk_idempotency_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("tenant", "key", name=op.f("pk_idempotency")),
    )
    with op.batch_alter_table("idempotency", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_idempotency_job"), ["job"], unique=False)

    op.create_table(
        "incumbents",
        sa.Column("job", sa.String(length=32), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("problem_version", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("source", sa.String(length=16), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("makespan_ms", sa.Float(), nullable=False),
        sa.Column("span_ms", sa.Float(), nullable=False),
        sa.Column("found_at", sa.String(length=40), nullable=False),
        sa.Column("programs", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=op.f("fk_incumbents_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", "seq", name=op.f("pk_incumbents")),
    )
    op.create_table(
        "log",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("job", sa.String(length=32), nullable=False),
        sa.Column("at", sa.String(length=40), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("level", sa.String(length=8), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=op.f("fk_log_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_log")),
    )
    with op.batch_alter_table("log", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_log_job"), ["job"], unique=False)

    op.create_table(
        "problems",
        sa.Column("job", sa.String(length=32), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=op.f("fk_problems_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", "version", name=op.f("pk_problems")),
    )


def downgrade() -> None:
    op.drop_table("problems")
    with op.batch_alter_table("log", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_log_job"))

    op.drop_table("log")
    op.drop_table("incumbents")
    with op.batch_alter_table("idempotency", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_idempotency_job"))

    op.drop_table("idempotency")
    op.drop_table("adoptions")
    with op.batch_alter_table("schedules", schema=None) as batch_op:
        batch_op.drop_index("ix_schedules_shape")

    op.drop_table("schedules")
    op.drop_table("keys")
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.drop_index("ix_jobs_tenant_state")
        batch_op.drop_index("ix_jobs_tenant_number")
        batch_op.drop_index("ix_jobs_state_priority")

    op.drop_table("jobs")
