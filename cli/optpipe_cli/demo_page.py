"""The pages of `optpipe demo`: both schedules on one time scale, below them the losses and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optpipe_runtime.demo.train import Step

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # its title, its columns and its rows
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 900, 230, 44, 34, 22


def save(path: Path, before: dict[str, Any], after: dict[str, Any], table: Table, steps: Sequence[Step] = ()) -> None:
    """Write a page.

    Parameters
    ----------
    before, after
        The contents of two schedule files.
    table
        What was measured.
    steps
        Those of a training, whose losses the page shows.
    """
    from optpipe.schedule import ScheduleFile
    from optpipe.show.page import plot

    first, last = (ScheduleFile.model_validate(file).schedule() for file in (before, after))
    plot(last, first, below=_table(*table) + (_losses(steps) if steps else "")).save(path)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<section><h2>{escape(title)}</h2><table>{line('th', columns)}{body}</table></section>"


def _losses(steps: Sequence[Step]) -> str:
    """The loss of each step, with a line where another schedule was swapped in."""
    from optpipe.show.svg import document, round_step

    losses = [step.loss for step in steps]
    low, high = min(losses), max(losses)
    unit = round_step(high - low or 1.0, 5)

    def x(k: float) -> float:
        return LEFT + (WIDTH - LEFT - 10) * k / max(1, len(losses) - 1)

    def y(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low or 1.0)

    body = [f'<text x="{LEFT}" y="18" fill="#333">loss by step; a grey line: another schedule was swapped in</text>']
    for k in range(1, len(steps)):
        if steps[k].version != steps[k - 1].version:
            body.append(f'<line x1="{x(k):.1f}" y1="{TOP}" x2="{x(k):.1f}" y2="{HEIGHT - BOTTOM}" stroke="#D5DAE0"/>')
    for tick in range(int(-(-low // unit)), int(high // unit) + 1):
        label = (
            f'<text x="{LEFT - 8}" y="{y(tick * unit) + 4:.1f}" text-anchor="end" fill="#777">{tick * unit:g}</text>'
        )
        body.append(label)
    for k in range(0, len(steps), 10 * -(-len(steps) // 100)):
        body.append(f'<text x="{x(k):.1f}" y="{HEIGHT - 6}" text-anchor="middle" fill="#777">{k}</text>')
    points = " ".join(f"{x(k):.1f},{y(loss):.1f}" for k, loss in enumerate(losses))
    body.append(f'<polyline points="{points}" fill="none" stroke="#0072B2" stroke-width="1.8"/>')
    return f"<section><h2>Losses of the training</h2>{document(WIDTH, HEIGHT, body)}</section>"
