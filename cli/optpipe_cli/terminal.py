"""What a terminal shows: text, whatever stands in it; progress; and what Ctrl-C does meanwhile."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.segment import Segment
from rich.text import Text

from optpipe.printable import printable

REFRESH_S = 0.2


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


@contextmanager
def ctrl_c_calls(cancel: Callable[[], None]) -> Iterator[None]:
    """Within the block Ctrl-C asks a search to end with the best so far; a second Ctrl-C ends the command."""

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # In a thread, because the main thread may hold the lock that `cancel` needs.
        threading.Thread(target=cancel, daemon=True).start()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def shown_while(view: Callable[[], RenderableType], on: bool) -> Iterator[None]:
    """Keep a view on stderr while the block runs, made anew several times a second from another thread."""
    if not on:
        yield
        return

    console = new_console(stderr=True)
    with Live(console=console, get_renderable=lambda: Plain(view()), refresh_per_second=1 / REFRESH_S, transient=True):
        yield


@contextmanager
def waiting(text: str, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show a line on stderr during the block, and yield a function that changes it; nothing if stderr is not a
    terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    with new_console(stderr=True).status(Text(text)) as status:
        yield lambda text: status.update(Text(printable(text)))
