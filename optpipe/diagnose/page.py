"""The page of a diagnosis: the measured and the cured step on one time scale, losses as a waterfall, devices by steps
as a heat map, and the cures with their lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape

import numpy as np

from optpipe.diagnose.losses import NAMES
from optpipe.diagnose.report import Diagnosis
from optpipe.diagnose.slow import excess_of
from optpipe.model.arrays import Floats
from optpipe.printable import printable
from optpipe.show.page import Picture, plot
from optpipe.show.svg import document, text_of

WIDTH, LEFT, BAR, RIGHT = 900, 300, 20, 80
MOST_ROWS, MOST_STEPS = 64, 200  # of a heat map
AVOIDABLE, GIVEN = "#D55E00", "#0072B2"
CELL = 14
HOTTEST = 1.5  # times as long as others with the same work, or more
STYLE = (
    "<style>:target { outline: 3px solid var(--accent); } pre { white-space: pre-wrap; overflow-wrap: anywhere; } "
    "section svg { max-width: 100%; height: auto; }</style>"
)


def picture(diagnosis: Diagnosis) -> Picture:
    """The page. Raises InputError if plotly is not installed."""
    cures = diagnosis.cures
    before = replace(cures.before, method="as it ran")
    after = replace(cures.cures[0].schedule, method="cured") if cures.cures else None
    below = "".join((STYLE, *_sections(diagnosis)))
    return plot(after, before, below=below) if after else plot(before, below=below)


def _sections(diagnosis: Diagnosis) -> Iterator[str]:
    step = diagnosis.cures.steps[-1]
    yield _section("Above", f"<p>The slowest replica of step {step}, replayed with its own times.</p>")
    yield _section("Causes", _list(diagnosis.causes or ["nothing costs more than 3% of a step"]))
    yield _section("Where the time of a step goes", waterfall(diagnosis))
    if len(diagnosis.runs.step) > 1:
        yield _section("Devices by steps: how many times as long as others with the same work", heat_map(diagnosis))
    yield _section("Steps", _steps(diagnosis))
    for cure in diagnosis.cures.cures:
        lines = escape("\n".join(map(printable, cure.lines)))
        yield _section(
            f"{cure.title}: {cure.gain:.1%} less",
            f"<p>From {cure.before_ms.mean():.1f} to {cure.ms.mean():.1f} ms; no schedule with the same freedom is "
            f"below {cure.bound_ms.mean():.1f} ms. The fullest device holds {max(cure.activations):g} activations, "
            f"today {max(diagnosis.cures.held):g}.</p><pre>{lines}</pre>",
        )
    for title, sentences in (
        ("Would help", diagnosis.cures.asked),
        ("Taken to be so", diagnosis.runs.assumed),
        ("Not used", diagnosis.runs.unused),
    ):
        if sentences:
            yield _section(title, _list(sentences))


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(printable(title))}</h2>{content}</section>"


def _list(sentences: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(printable(each))}</li>' for each in sentences)}</ul>"


def waterfall(diagnosis: Diagnosis) -> str:
    """The parts of the mean step, one below the other, as SVG: each begins where the one before ends."""
    parts = [part for part in reversed(diagnosis.losses.parts) if part.avoidable or part.mean_ms]
    ends = np.cumsum([part.mean_ms for part in parts])
    scale = (WIDTH - LEFT - RIGHT) / max(1e-12, float(ends.max()))
    body = []
    for n, (part, end) in enumerate(zip(parts, ends.tolist(), strict=True)):
        top, begin = 8 + n * (BAR + 6), end - part.mean_ms
        x, width = LEFT + scale * min(begin, end), max(1.0, scale * abs(part.mean_ms))
        share = part.ms / diagnosis.losses.measured_ms
        colour = AVOIDABLE if part.avoidable else GIVEN
        title = f"{NAMES[part.name]}: {part.mean_ms:.1f} ms; by steps {share.min():.1%} to {share.max():.1%}"
        body += [
            f'<text x="{LEFT - 8}" y="{top + 14}" text-anchor="end" fill="#222">{text_of(NAMES[part.name])}</text>',
            f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{colour}">'
            f"<title>{text_of(title)}</title></rect>",
            f'<text x="{x + width + 6:.1f}" y="{top + 14}" fill="#222">{part.mean_ms:.1f} ms</text>',
        ]
    return document(WIDTH, 16 + len(parts) * (BAR + 6), body)


def heat_map(diagnosis: Diagnosis) -> str:
    """Devices by steps as SVG, those that are slow first; a cell leads to its step."""
    runs, excess = diagnosis.runs, np.exp(excess_of(diagnosis.runs))
    rows = [(replica, device) for replica in runs.replicas.tolist() for device in range(runs.devices)]
    of_row = {row: excess[runs.replica == row[0], row[1]] for row in rows}
    rows.sort(key=lambda row: -float(np.median(of_row[row])))
    steps, rows = runs.steps[:MOST_STEPS].tolist(), rows[:MOST_ROWS]
    rows.sort(key=lambda row: (-int(np.median(of_row[row]) > 1.05), row))
    cell = max(4, min(3 * CELL, (WIDTH - 140) // len(steps)))
    body = []
    for n, (replica, device) in enumerate(rows):
        label = f"replica {replica}, device {device}"
        body.append(f'<text x="128" y="{n * CELL + 12}" text-anchor="end" fill="#222">{label}</text>')
        for k, step in enumerate(steps):
            (factor,) = excess[(runs.replica == replica) & (runs.step == step), device].tolist()
            title = f"<title>{label}, step {step}: {factor:.2f}</title>"
            place = f'x="{136 + k * cell}" y="{n * CELL + 2}" width="{cell - 1}" height="{CELL - 1}"'
            body.append(f'<a href="#step-{step}"><rect {place} fill="{_heat(factor)}">{title}</rect></a>')
    shown = len(runs.replicas) * runs.devices - len(rows), len(runs.steps) - len(steps)
    more = f"<p>Left out: {shown[0]} devices that are less slow, {shown[1]} later steps.</p>" if any(shown) else ""
    return document(WIDTH, 8 + len(rows) * CELL, body) + more


def _heat(factor: float) -> str:
    share = min(1.0, max(0.0, (factor - 1) / (HOTTEST - 1)))
    cold, hot = (233, 236, 240), (179, 18, 79)
    return "#" + "".join(f"{round(a + share * (b - a)):02X}" for a, b in zip(cold, hot, strict=True))


def _steps(diagnosis: Diagnosis) -> str:
    """A table: each step with its parts, in ms."""
    losses = diagnosis.losses
    shown = [part for part in losses.parts if np.abs(part.ms).max() > 0.001 * losses.measured_ms.mean()]
    columns: list[tuple[str, Floats]] = [("measured", losses.measured_ms), *((part.name, part.ms) for part in shown)]
    head = "".join(f"<th>{escape(name)}</th>" for name in ("step", *(name for name, _ in columns)))
    body = "".join(
        f'<tr id="step-{step}"><td>{step}</td>{"".join(f"<td>{ms[n]:.1f}</td>" for _, ms in columns)}</tr>'
        for n, step in enumerate(losses.steps[:MOST_STEPS].tolist())
    )
    return f'<div class="scrolls"><table><tr>{head}</tr>{body}</table></div>'
