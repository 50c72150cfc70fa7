"""The tables of the first release, which `upgrade` makes from `tables`."""

from __future__ import annotations

revision = "0003"  # those of 0001 and 0002 were never released
down_revision = None


def upgrade() -> None:
    pass
