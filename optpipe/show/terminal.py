"""A Gantt chart in the terminal: one row a device, whose cells show the last digit of the micro-batch."""

from __future__ import annotations

from rich.text import Text

from optpipe.model.ops import COMPUTE, Kind
from optpipe.show.lanes import COLOURS, NAMES, Scheduled, blocks, kinds_in, text_colour
from optpipe.show.svg import bytes_text

LABEL = 12


def chart(schedule: Scheduled, width: int = 100, colours: bool = True) -> Text:
    """The chart, `width` characters wide. Of several ops in one cell it shows the one that takes most of it.

    Colours tell kinds apart; without them a second line for each device does, with a letter for each kind.
    """
    columns = max(10, width - LABEL)
    cell = schedule.makespan_ms / columns or 1.0
    devices = len(schedule.problem.devices)
    shares: list[list[tuple[float, str, str, str]]] = [[(0.0, " ", "", " ")] * columns for _ in range(devices)]
    for block in blocks(schedule):
        if block.transfer:
            continue
        for column in range(int(block.start / cell), min(columns - 1, int(block.end / cell)) + 1):
            share = min(block.end, (column + 1) * cell) - max(block.start, column * cell)
            if share > shares[block.device][column][0]:
                digit, style = str(block.op.microbatch % 10), f"{text_colour(block.colour)} on {block.colour}"
                shares[block.device][column] = (share, digit, style, _letter(block.op.kind))
    text = Text(no_wrap=True)
    peaks = schedule.compiled.certificate.device
    for device, row in enumerate(shares):
        text.append(f"device {device}".ljust(LABEL))
        for _, digit, style, _ in row:
            text.append(digit, style or None)
        text.append(f"  {bytes_text(peaks[device].bytes)} of {bytes_text(peaks[device].limit or 0)}\n", "dim")
        if not colours:
            text.append(" " * LABEL + "".join(letter for *_, letter in row).rstrip() + "\n")
    text.append(" " * LABEL)
    for kind in kinds_in(schedule):
        if kind in COMPUTE:
            text.append("  " if colours else f"{_letter(kind)} =", f"on {COLOURS[kind]}")
            text.append(f" {NAMES[kind]}   ")
    text.rstrip()
    text.append(f"\n{' ' * LABEL}a digit is the last one of the micro-batch's number")
    return text


def _letter(kind: Kind) -> str:
    """One letter for each kind of compute op; `b` is the full backward."""
    return "b" if kind == Kind.BW else kind.name
