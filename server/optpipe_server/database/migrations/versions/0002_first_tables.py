"""The tables of the first release, which `upgrade` makes from `tables`."""

from __future__ import annotations

revision = "0002"  # 0001 had no table of rules, and was never released
down_revision = None


def upgrade() -> None:
    pass
