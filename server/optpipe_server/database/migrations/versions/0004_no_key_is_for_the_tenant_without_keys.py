"""Jobs from before the first key belong to a tenant that no key can be for.

It was `local`, whose keys shared them. Where there is such a key, nobody can tell whose they are: they stay.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

BEFORE, NOW = "local", "(no key)"


def upgrade() -> None:
    _rename(BEFORE, NOW)


def downgrade() -> None:
    _rename(NOW, BEFORE)


def _rename(before: str, now: str) -> None:
    keyed = op.get_bind().execute(sa.text("SELECT 1 FROM keys WHERE tenant = :tenant LIMIT 1"), {"tenant": BEFORE})
    if keyed.first() is None:
        for table in ("jobs", "idempotency"):  # schedules found without a key are in a file
            change = sa.text(f"UPDATE {table} SET tenant = :now WHERE tenant = :before")
            op.execute(change.bindparams(now=now, before=before))
