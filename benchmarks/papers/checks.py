"""Published figures beside ours, one record each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.tables import head, line


@dataclass(frozen=True)
class Check:
    """A published figure and ours. `note` says what is assumed beyond what was published."""

    source: str
    what: str
    unit: str
    published: float
    ours: float
    note: str = ""

    @property
    def error(self) -> float:
        return self.ours / self.published - 1


def table(rows: Iterable[Check]) -> str:
    """The comparisons as a table."""
    columns = ("source", "what", "unit", "published", "ours", "error", "assumed")
    figures = (
        (row.source, row.what, row.unit, f"{row.published:g}", f"{row.ours:.4g}", f"{row.error:+.1%}", row.note)
        for row in rows
    )
    return "\n".join((head(columns, "lllrrrl"), *map(line, figures)))
