"""Memory against makespan, as SVG: a point a schedule, the frontier of what is published, and the solver's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from optpipe.show.svg import bytes_text

WIDTH, HEIGHT = 1040, 560
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 84, 46  # around the axes
LONGEST = 1.7  # times the shortest: what is longer is only named
COLOURS = ("#C0392B", "#2F6DB5", "#3A8F6B", "#8E5BB0")  # of the solver's frontiers
PUBLISHED = "#6B7680"


class Point(NamedTuple):
    """A schedule: its name, the peak of the device that holds most, and its makespan."""

    name: str
    bytes: int
    ms: float


class _Label(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: _Label) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


class _Axes:
    """Memory on a logarithmic axis, makespan on a linear one that begins a little below the shortest."""

    def __init__(self, published: Sequence[Point], own: Sequence[Point], budgets: Sequence[int]) -> None:
        points = (*published, *own)
        sizes = [max(1, size) for size in (*(point.bytes for point in points), *budgets)] or [1]
        self.least, self.most = min(sizes) / 1.15, max(sizes) * 1.25
        self.shortest = min((point.ms for point in points), default=1.0)
        near = [point.ms for point in published if point.ms <= LONGEST * self.shortest]
        self.longest = max([*near, *(point.ms for point in own)], default=2.0)
        room = 0.06 * (self.longest - self.shortest) or 0.05 * self.longest or 1.0
        self.low, self.high = self.shortest - room, self.longest + room

    def x(self, size: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(max(1, size) / self.least) / math.log(self.most / self.least)

    def y(self, ms: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (ms - self.low) / (self.high - self.low)


def frontier(points: Sequence[Point]) -> list[Point]:
    """Those that no other equals or betters in both, by memory."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.bytes, point.ms)):
        if not best or point.ms < best[-1].ms:
            best.append(point)
    return best


def chart(
    published: Sequence[Point], solver: Mapping[str, Sequence[Point]], budgets: Mapping[str, int], title: str = ""
) -> str:
    """The picture: `published` as grey points, each of the solver's series with a frontier of its own, budgets as
    dashed lines."""
    points = list(dict.fromkeys(published))
    solver = {
        name: list({(point.bytes, point.ms): point for point in series}.values()) for name, series in solver.items()
    }
    axes = _Axes(points, [point for series in solver.values() for point in series], list(budgets.values()))
    shown = [point for point in points if point.ms <= axes.longest]
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        ' font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="26" font-size="15" font-weight="600" fill="#111">{escape(title)}</text>',
        *_legend(list(solver)),
        *_grid(axes),
        *_budgets(axes, budgets),
        _steps(axes, frontier(shown), PUBLISHED),
    ]
    for colour, series in zip(COLOURS, solver.values(), strict=False):
        body.append(_steps(axes, frontier(series), colour))
    taken = [_around(axes, point) for series in solver.values() for point in series] + [
        _around(axes, point) for point in shown
    ]
    for point in shown:
        body += _point(axes, point, PUBLISHED, 3.2, taken)
    for colour, series in zip(COLOURS, solver.values(), strict=False):
        for point in series:
            body += _point(axes, point, colour, 4.6, taken, f"{point.ms:.4g} ms")
    if long := [
        f"{point.name} {point.ms:.6g} ms, {bytes_text(point.bytes)}" for point in points if point.ms > axes.longest
    ]:
        body.append(
            f'<text x="{WIDTH - RIGHT}" y="62" text-anchor="end" fill="#777">not drawn: '
            f"{escape('; '.join(long))}</text>"
        )
    return "\n".join([*body, "</svg>"]) + "\n"


def _legend(names: Sequence[str]) -> Iterator[str]:
    x = float(LEFT)
    for name, colour in (("published schedules", PUBLISHED), *zip(names, COLOURS, strict=False)):
        yield (
            f'<circle cx="{x + 5:.0f}" cy="42" r="4" fill="{colour}"/><text x="{x + 15:.0f}" y="46" '
            f'fill="#333">{escape(name)}</text>'
        )
        x += 40 + 6.4 * len(name)


def _grid(axes: _Axes) -> Iterator[str]:
    step = next(s * 10.0**k for k in range(-3, 9) for s in (1, 2, 5) if (axes.high - axes.low) / (s * 10.0**k) <= 8)
    value = math.ceil(axes.low / step) * step
    while value <= axes.high:
        yield (
            f'<line x1="{LEFT}" y1="{axes.y(value):.1f}" x2="{WIDTH - RIGHT}" y2="{axes.y(value):.1f}" '
            'stroke="#EEF1F4"/>'
        )
        yield f'<text x="{LEFT - 8}" y="{axes.y(value) + 4:.1f}" text-anchor="end" fill="#777">{value:.6g}</text>'
        value += step
    tick = next(s * 10**k for k in range(19) for s in (1, 2, 5) if s * 10**k >= axes.least)
    while tick <= axes.most:
        yield (
            f'<line x1="{axes.x(tick):.1f}" y1="{TOP}" x2="{axes.x(tick):.1f}" y2="{HEIGHT - BOTTOM}" '
            'stroke="#EEF1F4"/>'
        )
        yield (
            f'<text x="{axes.x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle" '
            f'fill="#777">{escape(bytes_text(tick))}</text>'
        )
        tick = tick * 5 // 2 if str(tick)[0] == "2" else tick * 2
    yield f'<text x="{LEFT - 8}" y="{TOP - 8}" text-anchor="end" fill="#777">ms</text>'
    yield (
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end" fill="#777">peak of the device that '
        "holds most</text>"
    )


def _budgets(axes: _Axes, budgets: Mapping[str, int]) -> Iterator[str]:
    for name, size in budgets.items():
        x = axes.x(size)
        yield (
            f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#C0392B" '
            'stroke-dasharray="4 3" opacity="0.6"/>'
        )
        yield (
            f'<text x="{x:.1f}" y="{TOP - 6}" text-anchor="middle" '
            f'fill="#C0392B">{escape(f"{name}: {bytes_text(size)}")}</text>'
        )


def _steps(axes: _Axes, points: Sequence[Point], colour: str) -> str:
    """What is reached with so much memory."""
    if not points:
        return ""
    path = [f"M{axes.x(points[0].bytes):.1f},{axes.y(points[0].ms):.1f}"]
    path += [f"H{axes.x(point.bytes):.1f} V{axes.y(point.ms):.1f}" for point in points[1:]]
    return (
        f'<path d="{" ".join(path)} H{WIDTH - RIGHT}" fill="none" stroke="{colour}" stroke-width="1.4" opacity="0.7"/>'
    )


def _point(
    axes: _Axes, point: Point, colour: str, radius: float, taken: list[_Label], label: str = ""
) -> Iterator[str]:
    """With its label, by default its name, where it covers no other one."""
    x, y = axes.x(point.bytes), axes.y(point.ms)
    hint = f"<title>{escape(point.name)}: {point.ms:.6g} ms, {bytes_text(point.bytes)}</title>"
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}">{hint}</circle>'
    label = label or point.name
    width = 6.1 * len(label)
    places = [(x + dx, y + dy) for dy in (4, -8, 16, -20, 28, -32, 40) for dx in (8, -8 - width)] + [
        (x - width / 2, y - 10)
    ]
    boxes = [_Label(left, base - 9, left + width, base + 2) for left, base in places]
    free = [box for box in boxes if box.right < WIDTH and not any(box.meets(other) for other in taken)]
    box = free[0] if free else boxes[0]
    taken.append(box)
    text = f'<text x="{box.left:.1f}" y="{box.bottom - 2:.1f}"'
    yield (
        f'{text} stroke="#ffffff" stroke-width="3">{escape(label)}</text>{text} fill="{colour}">{escape(label)}</text>'
    )


def _around(axes: _Axes, point: Point) -> _Label:
    x, y = axes.x(point.bytes), axes.y(point.ms)
    return _Label(x - 5, y - 5, x + 5, y + 5)
