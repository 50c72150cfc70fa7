"""What commands show: text, whatever stands in it; figures as text or JSON; progress; what Ctrl-C does meanwhile."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from optpipe.model.problem import Problem
from optpipe.text import printable

INFEASIBLE = 3  # exit code
WIDTH = 250  # characters of a line if the output is not a terminal, so that nothing is wrapped
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
    """Keep a view on stderr while the block runs, drawn several times a second from another thread."""
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


def echo(line: object = "", err: bool = False) -> None:
    """Print one line; what a terminal would obey or break in it becomes visible."""
    print(printable(line), file=sys.stderr if err else sys.stdout, flush=True)


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=1), flush=True)


def print_table(table: Table | str) -> None:
    """Print a table or a line as wide as the terminal. Elsewhere lines are as long as they need to be, without
    colours."""
    console = new_console(width=None if sys.stdout.isatty() else WIDTH)
    with console.capture() as text:
        console.print(Plain(table))
    for line in text.get().splitlines():
        print(line.rstrip(), flush=True)


def print_rows(rows: Sequence[Mapping[str, Any]], empty: str) -> None:
    """Print a table whose columns are the names of the rows' values; `empty` if there are none."""
    table = Table(*(rows[0] if rows else [empty]), box=None)
    for row in rows:
        table.add_row(*(f"{v:.6g}" if isinstance(v, float) else printable(v or "") for v in row.values()))
    print_table(table)


def print_figures(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> None:
    """Print a table under its title. Figures stand on the right; the first `names` columns, which have none, left."""
    table = Table(box=None, title=title, title_justify="left")
    for k, column in enumerate(columns):
        table.add_column(column, no_wrap=True, justify="left" if k < names else "right")
    for row in rows:
        table.add_row(*row)
    print_table(table)


def sizes_text(problem: Problem) -> str:
    """Return such as `4 devices, 8 stages, 16 micro-batches`."""
    return f"{len(problem.devices)} devices, {len(problem.stages)} stages, {problem.microbatches} micro-batches"
