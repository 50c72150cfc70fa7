"""Tables in Markdown, as the docs have them, and columns of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def line(cells: Iterable[object]) -> str:
    """One line of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def head(columns: Sequence[str], alignment: str) -> str:
    """The names of the columns, and the line below them; `alignment` has `l` or `r` for each column."""
    return f"{line(columns)}\n|{''.join('---:|' if side == 'r' else '---|' for side in alignment)}"


def text(value: float | None, form: str) -> str:
    """A figure in a format; a dash if it is not known."""
    return "–" if value is None else format(value, form)
