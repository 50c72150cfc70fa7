"""The tables of the first release, which `upgrade` makes from `tables`."""

from __future__ import annotations

revision = "0001"
down_revision = None


def upgrade() -> None:
    pass
