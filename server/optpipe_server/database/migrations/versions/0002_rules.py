"""Rules of streams."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rules",
        sa.Column("job", sa.String(32), nullable=False),
        sa.Column("rules", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("predicted_ms", sa.Float(), nullable=False),
        sa.Column("measured_ms", sa.Float(), nullable=False),
        sa.Column("told_at", sa.String(40), nullable=False),
        sa.PrimaryKeyConstraint("job", name="pk_rules"),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_rules_job", ondelete="CASCADE"),
    )


def downgrade() -> None:
    op.drop_table("rules")
