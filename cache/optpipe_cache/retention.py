"""What is kept of what piles up, in caches as among the jobs of a service: one rule."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from optpipe.errors import InputError

MOST_KEPT = 2**63 - 1  # the largest LIMIT of SQL


@dataclass(frozen=True)
class Retention:
    """What was used last is kept; of jobs, what ended last. Raises `InputError` for a negative number.

    Attributes
    ----------
    keep
        How many are kept; None is no limit.
    days
        How many days they are kept after that; None is no limit.
    """

    keep: int | None = None
    days: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep", self.keep), ("days", self.days)):
            if value is not None and not value >= 0:
                raise InputError(f"{name} = {value}: must not be negative")

    @property
    def limited(self) -> bool:
        return self.keep is not None or self.days is not None

    @property
    def most(self) -> int:
        """How many are kept at most."""
        return MOST_KEPT if self.keep is None else min(self.keep, MOST_KEPT)

    @property
    def since(self) -> str:
        """The time, ISO in UTC, before which nothing is kept; the empty text is before all."""
        if self.days is None:
            return ""
        try:
            return (datetime.now(UTC) - timedelta(days=self.days)).isoformat()
        except OverflowError:  # before the calendar begins
            return ""


KEEP_ALL = Retention()
