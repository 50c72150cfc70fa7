"""A Gantt chart in the terminal: a row a device, whose cells show the last digit of the micro-batch, and its memory."""

from __future__ import annotations

import numpy as np
from rich.text import Text

from optpipe.model.ops import COMPUTE, KINDS, Kind
from optpipe.schedule import Schedule
from optpipe.show.lanes import blocks, colour_of, kinds_in, memory_steps, several_stages, tallest, text_colour
from optpipe.text import bytes_text

LABEL = 12
LEAST_COLUMNS = 10
BELOW = 4  # lines under the devices, of which the caller may need one
LEVELS = " ▁▂▃▄▅▆▇█"

Cell = tuple[float, str, str, str]  # how much of a cell its op takes; its digit, style and letter


def chart(schedule: Schedule, width: int = 120, height: int | None = None, colours: bool = True) -> Text:
    """The chart, `width` characters wide. Of several ops in one cell it shows the one that takes most of it.

    Colours distinguish kinds, and a second line for each device shows its memory up to its limit. Without colours the
    second line has a letter for each kind. If there is room for `height` lines only, memory is left out first, then as
    many devices between others as needed.
    """
    devices, peaks = len(schedule.problem.devices), schedule.compiled.certificate.device
    held = [f"{bytes_text(peak.bytes)} of {bytes_text(peak.limit or 0)}" for peak in peaks]
    columns = max(LEAST_COLUMNS, width - LABEL - 2 - max(map(len, held)))
    room = max(1, height - BELOW) if height else 2 * devices
    doubled, step = 2 * devices <= room, -(-devices // room)
    text = Text(no_wrap=True)
    for device, row in list(enumerate(_cells(schedule, columns)))[::step]:
        text.append(f"device {device}".ljust(LABEL))
        for _, digit, style, _ in row:
            text.append(digit, style or None)
        text.append(f"  {held[device]}\n", "dim")
        if doubled and colours:
            text.append(" " * LABEL + _memory(schedule, device, columns) + "\n", "dim")
        elif doubled:
            text.append(" " * LABEL + "".join(letter for *_, letter in row).rstrip() + "\n")
    text.append(" " * LABEL)
    for kind in kinds_in(schedule):
        if kind in COMPUTE:
            text.append("  " if colours else f"{_letter(kind)} =", f"on {colour_of(kind)}")
            text.append(f" {KINDS[kind].word}   ")
    text.rstrip()
    below = ", below it the memory in use" if doubled and colours else ""
    text.append(f"\n{' ' * LABEL}a digit is the last one of the micro-batch's number{below}")
    if step > 1:
        text.append(f"; one device of {step} is shown")
    hints = ["later stages are darker"] if colours and several_stages(schedule.problem) else []
    hints += ["--html and --svg also draw transfers"] if any(block.transfer for block in blocks(schedule)) else []
    if hints:
        text.append(f"\n{' ' * LABEL}{'; '.join(hints)}")
    return text


def _cells(schedule: Schedule, columns: int) -> list[list[Cell]]:
    cell = schedule.makespan_ms / columns or 1.0
    cells: list[list[Cell]] = [[(0.0, " ", "", " ")] * columns for _ in schedule.problem.devices]
    for block in blocks(schedule):
        if block.transfer:
            continue
        for column in range(int(block.start / cell), min(columns - 1, int(block.end / cell)) + 1):
            share = min(block.end, (column + 1) * cell) - max(block.start, column * cell)
            if share > cells[block.device][column][0]:
                digit, style = str(block.op.microbatch % 10), f"{text_colour(block.colour)} on {block.colour}"
                cells[block.device][column] = (share, digit, style, _letter(block.op.kind))
    return cells


def _memory(schedule: Schedule, device: int, columns: int) -> str:
    """The most that the device holds in each cell, as a share of its limit, or of its peak if that is far below."""
    full = tallest(schedule.compiled.certificate.device[device])
    moments, held = memory_steps(schedule, device)
    moments, held = np.r_[-np.inf, moments], np.r_[0, held]
    edges = np.linspace(0, schedule.makespan_ms, columns + 1)
    begins = (np.searchsorted(moments, edges[:-1], side="right") - 1).tolist()
    ends = np.searchsorted(moments, edges[1:], side="left").tolist()
    most = [int(held[begin : max(end, begin + 1)].max()) for begin, end in zip(begins, ends, strict=True)]
    return "".join(LEVELS[min(8, -(-8 * size // full))] for size in most).rstrip()


def _letter(kind: Kind) -> str:
    """One letter for each kind of compute op; `b` is the full backward."""
    return "b" if kind == Kind.BW else kind.name
