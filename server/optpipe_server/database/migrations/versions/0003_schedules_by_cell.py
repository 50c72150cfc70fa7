"""Cached schedules are found by the cell of their features, and the longest unused go first.

What was cached has other features, so it goes: schedules are found again by solving.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

KEY = {"tenant": 64, "problem_sha256": 64, "objective": 16}  # the columns that stay, with their lengths


def upgrade() -> None:
    _make(
        {
            "ix_schedules_cell": ["tenant", "structure", "objective", "cell"],
            "ix_schedules_used": ["tenant", "used"],
        },
        sa.Column("structure", sa.String(64), nullable=False),
        sa.Column("features", sa.LargeBinary(), nullable=False),
        sa.Column("cell", sa.BigInteger(), nullable=False),
        sa.Column("used", sa.String(40), nullable=False),
        sa.Column("hits", sa.Integer(), nullable=False),
        sa.Column("entry", sa.Text(), nullable=False),
    )


def downgrade() -> None:
    _make(
        {"ix_schedules_shape": ["tenant", "shape", "objective"]},
        sa.Column("shape", sa.String(64), nullable=False),
        sa.Column("features", sa.Text(), nullable=False),
        sa.Column("added", sa.String(40), nullable=False),
        sa.Column("entry", sa.Text(), nullable=False),
    )


def _make(indexes: dict[str, list[str]], *columns: sa.Column[Any]) -> None:
    op.drop_table("schedules")
    key = [sa.Column(name, sa.String(length), nullable=False) for name, length in KEY.items()]
    op.create_table("schedules", *key, *columns, sa.PrimaryKeyConstraint(*KEY, name=op.f("pk_schedules")))
    for name, of in indexes.items():
        op.create_index(name, "schedules", of)
