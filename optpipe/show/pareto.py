"""Memory against makespan, as an interactive page: published schedules, the solver's, and the frontier of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import log10
from typing import Any, NamedTuple

from optpipe.show.page import Picture, standalone
from optpipe.text import bytes_text, printable

HEIGHT = 560
MOST_TIMES_SHORTEST = 1.7  # longer schedules lie outside of the axis, until a reader zooms out
SOLVER_COLOURS = ("#C0392B", "#2F6DB5", "#3A8F6B", "#8E5BB0")
PUBLISHED_COLOUR = "#6B7680"
TICKS = [first * 10**power for power in range(3, 15) for first in (1, 2, 5)]  # bytes
DRAW = """const { data, layout } = JSON.parse(document.getElementById("document").textContent);
await Plotly.newPlot("picture", data, layout, { responsive: true, displaylogo: false });
document.getElementById("picture").dataset.drawn = "true";
"""


class Point(NamedTuple):
    """A schedule: its name, the peak of the device that holds most, and its makespan."""

    name: str
    bytes: int
    ms: float


def frontier(points: Sequence[Point]) -> list[Point]:
    """The Pareto-optimal points, by memory: each needs more memory than the one before and is shorter."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.bytes, point.ms)):
        if not best or point.ms < best[-1].ms:
            best.append(point)
    return best


def chart(
    published: Sequence[Point],
    solver: Mapping[str, Sequence[Point]],
    budgets: Mapping[str, int],
    title: str = "",
    grey: str = "published schedules",
) -> Picture:
    """The picture, for notebooks and as a page.

    What is `published`, `grey` in the legend, has one frontier, whose points have their names beside them. Each series
    of the `solver`, at most as many as `SOLVER_COLOURS`, has a colour and a frontier of its own. `budgets` in bytes are
    dashed lines.
    """
    points = [*published, *(point for series in solver.values() for point in series)]
    shortest = min((point.ms for point in points), default=1.0)
    longest = max((point.ms for point in points if point.ms <= MOST_TIMES_SHORTEST * shortest), default=2.0)
    longest = max([longest, *(point.ms for series in solver.values() for point in series)])
    sizes = [max(1, size) for size in (*(point.bytes for point in points), *budgets.values())] or [1]
    margin = 0.06 * (longest - shortest) or 0.05 * longest
    data = _series(grey, published, PUBLISHED_COLOUR, 7, names=True)
    for colour, (name, series) in zip(SOLVER_COLOURS, solver.items(), strict=False):
        data += _series(name, series, colour, 10, names=False)
    layout = {
        "title": {"text": _plain(title), "x": 0.02},
        "height": HEIGHT,
        "font": {"family": "system-ui, sans-serif"},
        "legend": {"orientation": "h", "y": 1.12},
        "margin": {"t": 110, "l": 70, "r": 40, "b": 50},
        "xaxis": {
            "type": "log",
            "range": [log10(min(sizes) / 1.2), log10(max(sizes) * 1.3)],
            "title": {"text": "peak of the device that holds most"},
            "tickvals": TICKS,
            "ticktext": [bytes_text(tick) for tick in TICKS],
        },
        "yaxis": {"title": {"text": "ms"}, "range": [shortest - margin, longest + margin], "tickformat": ",~r"},
        "shapes": [_budget_line(f"{name}: {bytes_text(size)}", size) for name, size in budgets.items()],
    }
    return standalone(title, {"data": data, "layout": layout}, DRAW, HEIGHT)


def _series(name: str, points: Sequence[Point], colour: str, size: int, names: bool) -> list[dict[str, Any]]:
    """The points of a series, and its frontier: a step down at each of its points, beside it a name or a length."""
    best = frontier(points)
    others = [point for point in dict.fromkeys(points) if point not in best]
    line = {"shape": "hv", "width": 1.4, "color": colour}
    common = {
        "type": "scatter",
        "legendgroup": name,
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {"color": colour, "size": size},
        "textfont": {"color": colour, "size": 11},
        "cliponaxis": False,
        "textposition": "top right" if names else "bottom left",
    }
    return [
        common
        | how
        | {
            "x": [max(1, point.bytes) for point in some],
            "y": [point.ms for point in some],
            "text": [_plain(point.name if names else _length(point.ms)) for point in some],
            "customdata": [_plain(f"{p.name}: {p.ms:.6g} ms, {bytes_text(p.bytes)}") for p in some],
        }
        for some, how in (
            (others, {"mode": "markers", "showlegend": False}),
            (best, {"mode": "lines+markers+text", "name": _plain(name), "line": line}),
        )
    ]


def _budget_line(text: str, size: int) -> dict[str, Any]:
    place = {"type": "line", "x0": size, "x1": size, "yref": "paper", "y0": 0, "y1": 1}
    label = {"text": _plain(text), "textposition": "end", "textangle": 0, "yanchor": "bottom"}
    font = {"color": SOLVER_COLOURS[0], "size": 11}
    return place | {"line": {"color": SOLVER_COLOURS[0], "dash": "dash", "width": 1}, "label": label | {"font": font}}


def _length(ms: float) -> str:
    """At least four digits, and none of them as a power of ten."""
    return f"{ms:.4g} ms" if ms < 10_000 else f"{ms:.0f} ms"


def _plain(text: str) -> str:
    """Text for plotly, which reads some tags and entities in it."""
    return escape(printable(text), quote=False)
