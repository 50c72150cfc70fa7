"""Curves over an axis of sizes, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from optpipe.show.svg import document, round_step, text_of

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 64, 46  # around the axes
COLOURS = ("#2F6DB5", "#C0392B", "#3A8F6B", "#8E5BB0", "#B7791F", "#6B7680")
Curve = Sequence[tuple[float, float]]


def chart(curves: Mapping[str, Curve], title: str, x: str, y: str, logarithmic: bool = True) -> str:
    """The picture as SVG text.

    Parameters
    ----------
    curves
        By name: points, each a size and a value of at least 0. At most as many as `COLOURS`.
    x, y
        What is on the axes: sizes, each with a mark, and values from 0 on.
    logarithmic
        Whether the axis of sizes is, which then are above 0.
    """
    sizes = sorted({size for curve in curves.values() for size, _ in curve})
    most = max(value for curve in curves.values() for _, value in curve) or 1.0
    place = math.log if logarithmic else float
    first, width = sizes[0], place(sizes[-1]) - place(sizes[0]) or 1.0

    def at(size: float, value: float) -> tuple[float, float]:
        across = (WIDTH - LEFT - RIGHT) * (place(size) - place(first)) / width
        return LEFT + across, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / (1.05 * most)

    body = [
        f'<text x="{LEFT}" y="22" font-size="15" font-weight="600" fill="#111">{text_of(title)}</text>',
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end" fill="#777">{text_of(x)}</text>',
        f'<text x="16" y="{TOP - 8}" fill="#777">{text_of(y)}</text>',
    ]
    for size in sizes:
        across, low = at(size, 0.0)
        body.append(f'<text x="{across:.1f}" y="{low + 16:.1f}" text-anchor="middle" fill="#777">{size:.3g}</text>')
    step, value = round_step(most, 6), 0.0
    while value <= most:
        _, height = at(first, value)
        body.append(f'<line x1="{LEFT}" y1="{height:.1f}" x2="{WIDTH - RIGHT}" y2="{height:.1f}" stroke="#EEF1F4"/>')
        body.append(f'<text x="{LEFT - 8}" y="{height + 4:.1f}" text-anchor="end" fill="#777">{value:g}</text>')
        value += step
    legend = float(LEFT)
    for colour, (name, curve) in zip(COLOURS, curves.items(), strict=False):
        body += _curve([(*at(*point), f"{name}: {point[1]:.4g} at {point[0]:g}") for point in curve], colour)
        body.append(f'<circle cx="{legend + 5:.0f}" cy="38" r="4" fill="{colour}"/>')
        body.append(f'<text x="{legend + 14:.0f}" y="42" fill="#333">{text_of(name)}</text>')
        legend += 34 + 6.4 * len(name)
    return document(WIDTH, HEIGHT, body)


def _curve(points: Sequence[tuple[float, float, str]], colour: str) -> Iterator[str]:
    path = " L".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
    for x, y, hint in points:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{text_of(hint)}</title></circle>'
