"""The consoles of rich that commands use: what they show is text, whatever stands in it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment

from optpipe.printable import printable


def new_console(stderr: bool = False, width: int | None = None) -> Console:
    """Return a console that reads no markup: a name such as `[red]` is a name."""
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


class Plain:
    """Something to show, without control characters in its text, such as a file's name for a problem may have."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._shown, options):
            text = "\n".join(map(printable, segment.text.split("\n")))
            yield segment if segment.control else Segment(text, segment.style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._shown)
