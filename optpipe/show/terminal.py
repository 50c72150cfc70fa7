"""A Gantt chart in the terminal: one row a device, whose cells show the last digit of the micro-batch."""

from __future__ import annotations

from rich.text import Text

from optpipe.model.ops import COMPUTE
from optpipe.schedule import Schedule
from optpipe.show.lanes import COLOURS, NAMES, blocks, kinds_in
from optpipe.show.svg import bytes_text

LABEL = 12


def chart(schedule: Schedule, width: int = 100) -> Text:
    """The chart, `width` characters wide. Of several ops in one cell it shows the one that takes most of it."""
    columns = max(10, width - LABEL)
    cell = schedule.makespan_ms / columns or 1.0
    devices = len(schedule.problem.devices)
    shares: list[list[tuple[float, str, str]]] = [[(0.0, " ", "")] * columns for _ in range(devices)]
    for block in blocks(schedule):
        if block.transfer:
            continue
        for column in range(int(block.start / cell), min(columns - 1, int(block.end / cell)) + 1):
            share = min(block.end, (column + 1) * cell) - max(block.start, column * cell)
            if share > shares[block.device][column][0]:
                shares[block.device][column] = (share, str(block.op.microbatch % 10), f"white on {block.colour}")
    text = Text(no_wrap=True)
    peaks = schedule.compiled.certificate.device
    for device, row in enumerate(shares):
        text.append(f"device {device}".ljust(LABEL))
        for _, digit, style in row:
            text.append(digit, style or None)
        text.append(f"  {bytes_text(peaks[device].bytes)} of {bytes_text(peaks[device].limit or 0)}\n", "dim")
    text.append(" " * LABEL)
    for kind in kinds_in(schedule):
        if kind in COMPUTE:
            text.append("  ", f"on {COLOURS[kind]}")
            text.append(f" {NAMES[kind]}   ")
    return text
