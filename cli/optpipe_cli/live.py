"""What a terminal shows while a search runs: the best schedule, the bound, the gap, and which engine found what."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from optpipe.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from optpipe.results import Result

STEPS = 5  # of the incumbents so far, the last ones
REFRESH_S = 0.2
NOTES = 2  # likewise


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
    from rich.live import Live

    from optpipe_cli.console import Plain, new_console

    console = new_console(stderr=True)
    with Live(console=console, get_renderable=lambda: Plain(view()), refresh_per_second=1 / REFRESH_S, transient=True):
        yield


def view(result: Result, passed_s: float, time_limit_s: float) -> RenderableType:
    """One frame."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    head = Table.grid(padding=(0, 3))
    head.add_row(*(Text.assemble((f"{name} ", "dim"), (printable(value), "bold")) for name, value in _figures(result)))
    clock = Table.grid(padding=(0, 2), expand=False)
    clock.add_row(
        ProgressBar(total=time_limit_s, completed=min(passed_s, time_limit_s), width=40),
        Text(f"{passed_s:.0f} s of {time_limit_s:g} s, Ctrl-C keeps the best", "dim"),
    )
    steps = Table.grid(padding=(0, 3))
    for step in result.history[-STEPS:]:
        method = Text(printable(step.method), "cyan")
        steps.add_row(Text(f"{step.time_s:8.1f} s", "dim"), f"{step.value_ms:.6g} ms", method)
    return Group(head, clock, steps, *(Text(printable(note), "dim") for note in result.notes[-NOTES:]))


def _figures(result: Result) -> list[tuple[str, str]]:
    if result.value_ms is None or result.schedule is None:
        return [("best", "none yet"), ("bound", _ms(result.lower_bound_ms))]
    return [
        ("best", f"{_ms(result.value_ms)} by {result.method}"),
        ("bound", _ms(result.lower_bound_ms)),
        ("gap", "not known" if result.gap is None else f"{result.gap:.1%}" if result.gap else "proven optimal"),
        ("bubble", f"{result.schedule.timeline.bubble:.1%}"),
    ]


def _ms(value: float | None) -> str:
    return "not known" if value is None else f"{value:.6g} ms"
