"""Memory against makespan, as SVG: one point a schedule, the frontier of published schedules, and the solver's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from optpipe.show.svg import document, round_step, text_of
from optpipe.sizes import bytes_text

WIDTH, HEIGHT = 1040, 560
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 84, 46  # around the axes
MOST_TIMES_SHORTEST = 1.7  # a longer published schedule is listed above the axes instead of drawn
SOLVER_COLOURS = ("#C0392B", "#2F6DB5", "#3A8F6B", "#8E5BB0")
PUBLISHED_COLOUR = "#6B7680"


class Point(NamedTuple):
    """A schedule: its name, the peak of the device that holds most, and its makespan."""

    name: str
    bytes: int
    ms: float


class _Box(NamedTuple):
    """What a dot or a label covers, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: _Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


class _Axes:
    """Memory on a logarithmic axis, makespan on a linear one that begins a little below the shortest."""

    def __init__(self, published: Sequence[Point], solved: Sequence[Point], budgets: Sequence[int]) -> None:
        points = (*published, *solved)
        sizes = [max(1, size) for size in (*(point.bytes for point in points), *budgets)] or [1]
        self.min_bytes, self.max_bytes = min(sizes) / 1.15, max(sizes) * 1.25
        shortest = min((point.ms for point in points), default=1.0)
        drawn = [point.ms for point in published if point.ms <= MOST_TIMES_SHORTEST * shortest]
        self.longest_drawn_ms = max([*drawn, *(point.ms for point in solved)], default=2.0)
        margin = 0.06 * (self.longest_drawn_ms - shortest) or 0.05 * self.longest_drawn_ms or 1.0
        self.min_ms, self.max_ms = shortest - margin, self.longest_drawn_ms + margin

    def x(self, size: float) -> float:
        share = math.log(max(1, size) / self.min_bytes) / math.log(self.max_bytes / self.min_bytes)
        return LEFT + (WIDTH - LEFT - RIGHT) * share

    def y(self, ms: float) -> float:
        share = (ms - self.min_ms) / (self.max_ms - self.min_ms)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share


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
) -> str:
    """The picture as SVG text.

    Parameters
    ----------
    published
        Grey points with one frontier.
    solver
        Series by name, at most as many as `SOLVER_COLOURS`, each with a colour and a frontier of its own.
    budgets
        Bytes by name, drawn as dashed lines.
    grey
        What the grey points are, for the legend.
    """
    published = list(dict.fromkeys(published))
    series = {
        name: list({(point.bytes, point.ms): point for point in points}.values()) for name, points in solver.items()
    }
    coloured = list(zip(SOLVER_COLOURS, series.values(), strict=False))
    solved = [point for points in series.values() for point in points]
    axes = _Axes(published, solved, list(budgets.values()))
    drawn = [point for point in published if point.ms <= axes.longest_drawn_ms]
    body = [
        f'<text x="{LEFT}" y="26" font-size="15" font-weight="600" fill="#111">{text_of(title)}</text>',
        *_legend(grey, list(series)),
        *_grid(axes),
        *_budget_lines(axes, budgets),
        _frontier_line(axes, drawn, PUBLISHED_COLOUR),
        *(_frontier_line(axes, points, colour) for colour, points in coloured),
    ]
    covered = [_dot_box(axes, point) for point in (*solved, *drawn)]
    for points in (drawn, *series.values()):
        covered += _line_boxes(axes, points)
    names = [point.name for point in drawn]
    for point in drawn:
        label = point.name if names.count(point.name) == 1 else f"{point.name}, {bytes_text(point.bytes)}"
        body += _labelled_dot(axes, point, label, PUBLISHED_COLOUR, 3.2, covered)
    for colour, points in coloured:
        for point in points:
            body += _labelled_dot(axes, point, f"{_rounded(point.ms)} ms", colour, 4.6, covered)
    if too_long := [point for point in published if point.ms > axes.longest_drawn_ms]:
        listed = "; ".join(f"{point.name} {point.ms:.6g} ms, {bytes_text(point.bytes)}" for point in too_long)
        body.append(
            f'<text x="{WIDTH - RIGHT}" y="62" text-anchor="end" fill="#777">not drawn: {text_of(listed)}</text>'
        )
    return document(WIDTH, HEIGHT, body)


def _rounded(ms: float) -> str:
    """At least four digits, and none of them as a power of ten."""
    return f"{ms:.4g}" if ms < 10_000 else f"{ms:.0f}"


def _legend(grey: str, names: Sequence[str]) -> Iterator[str]:
    x = float(LEFT)
    for name, colour in ((grey, PUBLISHED_COLOUR), *zip(names, SOLVER_COLOURS, strict=False)):
        yield (
            f'<circle cx="{x + 5:.0f}" cy="42" r="4" fill="{colour}"/><text x="{x + 15:.0f}" y="46" '
            f'fill="#333">{text_of(name)}</text>'
        )
        x += 40 + 6.4 * len(name)


def _grid(axes: _Axes) -> Iterator[str]:
    step = round_step(axes.max_ms - axes.min_ms, 8)
    value = math.ceil(axes.min_ms / step) * step
    while value <= axes.max_ms:
        yield (
            f'<line x1="{LEFT}" y1="{axes.y(value):.1f}" x2="{WIDTH - RIGHT}" y2="{axes.y(value):.1f}" '
            'stroke="#EEF1F4"/>'
        )
        yield f'<text x="{LEFT - 8}" y="{axes.y(value) + 4:.1f}" text-anchor="end" fill="#777">{value:.6g}</text>'
        value += step
    tick = next(s * 10**k for k in range(19) for s in (1, 2, 5) if s * 10**k >= axes.min_bytes)
    while tick <= axes.max_bytes:
        yield (
            f'<line x1="{axes.x(tick):.1f}" y1="{TOP}" x2="{axes.x(tick):.1f}" y2="{HEIGHT - BOTTOM}" '
            'stroke="#EEF1F4"/>'
        )
        yield (
            f'<text x="{axes.x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle" '
            f'fill="#777">{text_of(bytes_text(tick))}</text>'
        )
        tick = tick * 5 // 2 if str(tick)[0] == "2" else tick * 2
    yield f'<text x="{LEFT - 8}" y="{TOP - 8}" text-anchor="end" fill="#777">ms</text>'
    yield (
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end" fill="#777">peak of the device that '
        "holds most</text>"
    )


def _budget_lines(axes: _Axes, budgets: Mapping[str, int]) -> Iterator[str]:
    for name, size in budgets.items():
        x = axes.x(size)
        yield (
            f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#C0392B" '
            'stroke-dasharray="4 3" opacity="0.6"/>'
        )
        yield (
            f'<text x="{x:.1f}" y="{TOP - 6}" text-anchor="middle" '
            f'fill="#C0392B">{text_of(f"{name}: {bytes_text(size)}")}</text>'
        )


def _frontier_line(axes: _Axes, points: Sequence[Point], colour: str) -> str:
    """A step down at each point of the frontier."""
    if not points:
        return ""
    first, *others = frontier(points)
    path = [f"M{axes.x(first.bytes):.1f},{axes.y(first.ms):.1f}"]
    path += [f"H{axes.x(point.bytes):.1f} V{axes.y(point.ms):.1f}" for point in others]
    return (
        f'<path d="{" ".join(path)} H{WIDTH - RIGHT}" fill="none" stroke="{colour}" stroke-width="1.4" opacity="0.7"/>'
    )


def _line_boxes(axes: _Axes, points: Sequence[Point]) -> Iterator[_Box]:
    """What the line of a frontier covers: to the right of each point, and down to the next."""
    best = frontier(points)
    rights = [axes.x(point.bytes) for point in best[1:]] + [WIDTH - RIGHT]
    bottoms = [axes.y(point.ms) for point in best[1:]]
    for point, right in zip(best, rights, strict=True):
        yield _Box(axes.x(point.bytes), axes.y(point.ms) - 1, right, axes.y(point.ms) + 1)
    for point, x, bottom in zip(best, rights, bottoms, strict=False):
        yield _Box(x - 1, axes.y(point.ms), x + 1, bottom)


def _labelled_dot(
    axes: _Axes, point: Point, label: str, colour: str, radius: float, covered: list[_Box]
) -> Iterator[str]:
    """A dot and its label, which is put where it overlaps nothing in `covered` and is added to it."""
    x, y = axes.x(point.bytes), axes.y(point.ms)
    hint = f"<title>{text_of(point.name)}: {point.ms:.6g} ms, {bytes_text(point.bytes)}</title>"
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}">{hint}</circle>'
    boxes = _label_boxes(x, y, 6.1 * len(label))
    free = (box for box in boxes if box.right < WIDTH and not any(box.overlaps(other) for other in covered))
    box = next(free, boxes[0])
    covered.append(box)
    text, words = f'<text x="{box.left:.1f}" y="{box.bottom - 2:.1f}"', text_of(label)
    yield f'{text} stroke="#ffffff" stroke-width="3">{words}</text>{text} fill="{colour}">{words}</text>'


def _label_boxes(x: float, y: float, width: float) -> list[_Box]:
    """Where the label of a dot may be, the best place first: right or left of it at several heights, or above it."""
    places = [(x + dx, y + dy) for dy in (4, -6, 14, -18, 26, -30, 38) for dx in (8, -11 - width)]
    places += [(x - width / 2, y - 10), (x - width / 2, y + 18)]
    return [_Box(left, baseline - 9, left + width, baseline + 2) for left, baseline in places]


def _dot_box(axes: _Axes, point: Point) -> _Box:
    x, y = axes.x(point.bytes), axes.y(point.ms)
    return _Box(x - 5, y - 5, x + 5, y + 5)
