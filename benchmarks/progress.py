"""How searches went, as SVG: a small panel for each problem, with the best value above the bound over time.

Time is on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from optpipe.evaluate.objective import reaches
from optpipe.show.svg import document, round_step

COLUMNS, WIDTH, HEIGHT, GAP = 3, 320, 150, 24
LEFT, TOP, BOTTOM, RIGHT = 46, 40, 24, 14  # margins around the axes of a panel
FIRST_S = 0.1  # where the time axis begins
LEAST_SHARE = 0.05  # the value axis of a panel reaches at least so far above the bound


@dataclass(frozen=True)
class Progress:
    """One search.

    `steps` are its incumbents in order, each as (time_s, value_ms, method). `bound_ms` is the final lower bound.
    """

    name: str
    steps: Sequence[tuple[float, float, str]]
    bound_ms: float
    end_s: float


def chart(searches: Sequence[Progress], title: str = "") -> str:
    """The picture as SVG text.

    All panels have the same time axis. The value axis of each goes from the bound (dashed) to the first schedule.
    """
    columns = max(1, min(COLUMNS, len(searches)))
    rows = -(-len(searches) // columns)
    width, height = GAP + columns * (WIDTH + GAP), 52 + rows * (HEIGHT + GAP)
    latest = max([10.0, *(search.end_s for search in searches)])
    body = [f'<text x="{GAP}" y="26" font-size="15" font-weight="600" fill="#111">{escape(title)}</text>']
    for i, search in enumerate(searches):
        body += _panel(search, GAP + i % columns * (WIDTH + GAP), 44 + i // columns * (HEIGHT + GAP), latest)
    return document(width, height, body)


def _panel(search: Progress, left: float, top: float, latest: float) -> Iterator[str]:
    first, last = left + LEFT, left + WIDTH - RIGHT
    high, low = top + TOP, top + HEIGHT - BOTTOM
    decades = math.log10(latest / FIRST_S)
    above = [
        (time_s, value / search.bound_ms - 1.0, value, method)
        for time_s, value, method in search.steps
        if search.bound_ms > 0
    ]
    most = max([LEAST_SHARE, *(share for _, share, _, _ in above)])

    def x(time_s: float) -> float:
        return first + (last - first) * math.log10(max(FIRST_S, time_s) / FIRST_S) / decades

    def y(share: float) -> float:
        return low - (low - high) * share / most

    yield f'<text x="{left}" y="{top + 14}" font-size="12" font-weight="600" fill="#222">{escape(search.name)}</text>'
    yield f'<text x="{last:.1f}" y="{top + 14}" text-anchor="end" fill="#333">{escape(_figures(search))}</text>'
    for time_s in _decades(latest):
        yield f'<line x1="{x(time_s):.1f}" y1="{high}" x2="{x(time_s):.1f}" y2="{low}" stroke="#EEF1F4"/>'
        yield f'<text x="{x(time_s):.1f}" y="{low + 15}" text-anchor="middle" fill="#777">{time_s:.3g} s</text>'
    for share in _ticks(most):
        yield f'<line x1="{first}" y1="{y(share):.1f}" x2="{last}" y2="{y(share):.1f}" stroke="#EEF1F4"/>'
        yield f'<text x="{first - 6}" y="{y(share) + 4:.1f}" text-anchor="end" fill="#777">+{share:.0%}</text>'
    yield f'<line x1="{first}" y1="{low}" x2="{last}" y2="{low}" stroke="#C0392B" stroke-dasharray="4 3"/>'
    yield f'<text x="{first - 6}" y="{low + 4}" text-anchor="end" fill="#777">bound</text>'
    if not above:
        return
    path = [f"M{x(above[0][0]):.1f},{y(above[0][1]):.1f}"]
    path += [f"H{x(time_s):.1f} V{y(share):.1f}" for time_s, share, _, _ in above[1:]]
    yield f'<path d="{" ".join(path)} H{x(search.end_s):.1f}" fill="none" stroke="#2F6DB5" stroke-width="1.6"/>'
    for time_s, share, value, method in above:
        hint = f"<title>{value:.6g} ms by {escape(method)} after {time_s:.2f} s</title>"
        yield f'<circle cx="{x(time_s):.1f}" cy="{y(share):.1f}" r="2.4" fill="#2F6DB5">{hint}</circle>'


def _figures(search: Progress) -> str:
    if not search.steps:
        return "no schedule"
    value = search.steps[-1][1]
    proven = reaches(value, search.bound_ms)
    return f"{value:.6g} ms, " + ("proven optimal" if proven else f"bound {search.bound_ms:.6g} ms")


def _decades(latest: float) -> list[float]:
    """The labels of the time axis: powers of ten, and the end if there is room for it."""
    powers = [10.0**k for k in range(round(math.log10(FIRST_S)), math.floor(math.log10(latest)) + 1)]
    return [*powers, latest] if latest > 2.5 * powers[-1] else powers


def _ticks(most: float) -> list[float]:
    """The labels of the value axis: some round shares above the bound."""
    step = round_step(most, 3.99)
    return [step * i for i in range(1, math.floor(most / step + 1e-9) + 1)]
