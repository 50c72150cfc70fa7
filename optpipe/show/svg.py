"""A Gantt chart as SVG: compute, transfers and memory of each device, the memory with its limit."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from optpipe.evaluate.effects import Peak
from optpipe.model.ops import KINDS
from optpipe.schedule import Schedule
from optpipe.show import lanes
from optpipe.show.lanes import Block, blocks, colour_of, kinds_in
from optpipe.text import bytes_text, printable

WIDTH, LEFT, TOP, COMPUTE, TRANSFER, MEMORY, GAP = 1200, 74, 58, 24, 12, 26, 12
MOST_TITLES = 20_000  # with more blocks there are no tooltips: the file would be too large to open


def gantt(schedule: Schedule, title: str = "", until_ms: float | None = None) -> str:
    """The picture as SVG text. The time axis ends at `until_ms` at least, so that two can be compared by eye."""
    horizon = max(until_ms or 0.0, schedule.makespan_ms) or 1.0
    scale = (WIDTH - LEFT - 16) / horizon
    drawn = list(blocks(schedule))
    pitch = COMPUTE + (TRANSFER + 2 if any(block.transfer for block in drawn) else 0) + MEMORY + GAP
    height = TOP + pitch * len(schedule.problem.devices) + 22
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        *_head(schedule, title),
        *_axis(horizon, scale, height),
    ]
    for block in drawn:
        top = TOP + block.device * pitch + (COMPUTE + 2 if block.transfer else 0)
        body.append(_block(block, scale, top, titled=len(drawn) <= MOST_TITLES))
    for device, peak in enumerate(schedule.compiled.certificate.device):
        top = TOP + device * pitch
        body.append(f'<text x="{LEFT - 8}" y="{top + 16}" text-anchor="end" fill="#222">device {device}</text>')
        body += _memory(schedule, device, peak, scale, horizon, top + pitch - MEMORY - GAP + 4)
    return "\n".join([*body, "</svg>"]) + "\n"


def _head(schedule: Schedule, title: str) -> Iterator[str]:
    name = title or f"{schedule.problem.name or 'schedule'} · {schedule.method}".rstrip(" ·")
    heading = escape(printable(name))  # no markup, and no character that XML does not have
    figures = f"makespan {schedule.makespan_ms:.6g} ms · bubble {schedule.timeline.bubble:.1%}"
    yield f'<text x="{LEFT}" y="20" font-size="15" font-weight="600" fill="#111">{heading}</text>'
    yield f'<text x="{WIDTH - 16}" y="20" font-size="12" text-anchor="end" fill="#333">{figures}</text>'
    x = float(LEFT)
    for kind in kinds_in(schedule):
        yield f'<rect x="{x}" y="30" width="11" height="11" rx="2" fill="{colour_of(kind)}"/>'
        yield f'<text x="{x + 16}" y="40" fill="#333">{KINDS[kind].word}</text>'
        x += 30 + 6.4 * len(KINDS[kind].word)
    yield f'<rect x="{x}" y="32" width="11" height="8" fill="#DCE3EA"/>'
    dashed = any(peak.limit == lanes.tallest(peak) for peak in schedule.compiled.certificate.device)
    darker = "; the later of a device's stages are darker" if lanes.several_stages(schedule.problem) else ""
    limit = ", limit dashed" if dashed else ""
    yield f'<text x="{x + 16}" y="40" fill="#333">activation memory{limit}{darker}</text>'


def _axis(horizon: float, scale: float, height: int) -> Iterator[str]:
    # The least of 1, 2 and 5 times a power of ten with at most 12 steps.
    step = next(s * 10.0**k for k in range(-3, 300) for s in (1, 2, 5) if horizon / (s * 10.0**k) <= 12)
    tick = 0.0
    while tick <= horizon:
        x = LEFT + tick * scale
        yield f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{height - 20}" stroke="#EEF1F4"/>'
        yield f'<text x="{x:.1f}" y="{height - 6}" text-anchor="middle" fill="#777">{tick:g}</text>'
        tick += step
    yield f'<text x="{LEFT - 8}" y="{height - 6}" text-anchor="end" fill="#777">ms</text>'


def _block(block: Block, scale: float, top: float, titled: bool) -> str:
    x, width = LEFT + block.start * scale, max((block.end - block.start) * scale, 0.3)
    height = TRANSFER if block.transfer else COMPUTE // 2 if block.half else COMPUTE
    top += height if block.half == "lower" else 0
    hint = f"<title>{block.op}: {block.start:.6g} – {block.end:.6g} ms</title>" if titled else ""
    shape = (
        f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{height}" fill="{block.colour}"'
        f' stroke="#fff" stroke-width="{0.6 if width > 3 else 0}">{hint}</rect>'
    )
    label = str(block.op.microbatch)
    size = min(8 if block.transfer or block.half else 11, int((width - 3) / (0.59 * len(label))))
    if size < 6:
        return shape
    return shape + (
        f'<text x="{x + width / 2:.1f}" y="{top + height / 2 + size * 0.36:.1f}" font-size="{size}"'
        f' text-anchor="middle" fill="{lanes.text_colour(block.colour)}" pointer-events="none">{label}</text>'
    )


def _memory(schedule: Schedule, device: int, peak: Peak, scale: float, horizon: float, top: float) -> Iterator[str]:
    tallest = lanes.tallest(peak)
    base = top + MEMORY - 4
    path, held = [f"M{LEFT},{base}"], 0
    for moment, now in lanes.memory_over_time(schedule, device):
        x = LEFT + moment * scale
        path += [f"L{x:.1f},{base - size / tallest * (MEMORY - 6):.1f}" for size in (held, now)]
        held = now
    yield f'<path d="{" ".join(path)} L{LEFT + horizon * scale:.1f},{base} Z" fill="#DCE3EA"/>'
    if peak.limit == tallest:
        y = base - (MEMORY - 6)
        yield (
            f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + horizon * scale:.1f}" y2="{y}" stroke="#C0392B" '
            'stroke-dasharray="4 3"/>'
        )
    yield f'<text x="{LEFT - 8}" y="{base}" font-size="9" text-anchor="end" fill="#777">{bytes_text(peak.bytes)}</text>'
