"""Bounds are kept as they rose, and a job has the value of its best schedule."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "bounds",
        sa.Column("job", sa.String(32), nullable=False),
        sa.Column("problem_version", sa.Integer(), nullable=False),
        sa.Column("lower_bound_ms", sa.Float(), nullable=False),
        sa.Column("found_at", sa.String(40), nullable=False),
        sa.PrimaryKeyConstraint("job", "problem_version", "lower_bound_ms", name=op.f("pk_bounds")),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=op.f("fk_bounds_job"), ondelete="CASCADE"),
    )
    op.execute(
        "insert into bounds select id, problem_version, lower_bound_ms, coalesce(ended_at, created_at) from jobs "
        "where lower_bound_ms is not null"
    )
    op.add_column("jobs", sa.Column("value_ms", sa.Float()))
    last = "i.job = jobs.id and i.seq = jobs.last_seq and i.problem_version = jobs.problem_version"
    op.execute(f"update jobs set value_ms = (select value_ms from incumbents i where {last})")


def downgrade() -> None:
    op.drop_column("jobs", "value_ms")
    op.drop_table("bounds")
