"""A job's options are one record, and incumbents have the value that their search minimizes.

Columns are added and dropped in place: SQLite's batch mode would drop the table, and with it what refers to its rows.
"""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

OLD = ("method", "objective", "time_limit_s", "gap_limit")
jobs = sa.table("jobs", sa.column("number"), sa.column("options"), *(sa.column(name) for name in OLD))


def upgrade() -> None:
    op.add_column("jobs", sa.Column("options", sa.Text(), nullable=False, server_default="{}"))
    db = op.get_bind()
    for row in db.execute(sa.select(jobs)).all():
        options = {name.removesuffix("_limit"): getattr(row, name) for name in OLD}
        db.execute(sa.update(jobs).where(jobs.c.number == row.number).values(options=json.dumps(options)))
    op.add_column("incumbents", sa.Column("value_ms", sa.Float(), nullable=False, server_default="0"))
    of_span = "select 1 from jobs where jobs.id = incumbents.job and jobs.objective = 'span'"
    op.execute(f"update incumbents set value_ms = case when exists ({of_span}) then span_ms else makespan_ms end")
    for name in OLD:
        op.drop_column("jobs", name)


def downgrade() -> None:
    op.add_column("jobs", sa.Column("method", sa.Text(), nullable=False, server_default="auto"))
    op.add_column("jobs", sa.Column("objective", sa.String(16), nullable=False, server_default="makespan"))
    op.add_column("jobs", sa.Column("time_limit_s", sa.Float(), nullable=False, server_default="60"))
    op.add_column("jobs", sa.Column("gap_limit", sa.Float(), nullable=False, server_default="0"))
    db = op.get_bind()
    for row in db.execute(sa.select(jobs)).all():
        options = json.loads(row.options)
        old = {name: options[name.removesuffix("_limit")] for name in OLD if name.removesuffix("_limit") in options}
        db.execute(sa.update(jobs).where(jobs.c.number == row.number).values(**old))
    op.drop_column("jobs", "options")
    op.drop_column("incumbents", "value_ms")
