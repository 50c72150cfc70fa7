"""What commands print: figures as text or, with `--json`, as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.errors import InputError
from optpipe.printable import printable

if TYPE_CHECKING:
    from rich.table import Table

    from optpipe.results import Result

ProblemPath = Annotated[Path, typer.Argument(metavar="PROBLEM", help="A problem file.")]
SchedulePath = Annotated[Path, typer.Argument(metavar="SCHEDULE", help="A schedule file.")]
ScheduleOutput = Annotated[Path | None, typer.Option("--output", "-o", help="Write the schedule file here.")]
ProblemOutput = Annotated[Path | None, typer.Option("--output", "-o", help="Write the problem file here.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
INFEASIBLE = 3  # exit code
WIDTH = 250  # characters of a line if the output is not a terminal, so that nothing is wrapped


def echo(line: object = "", err: bool = False) -> None:
    """Print one line; what a terminal would obey or break in it is made visible."""
    typer.echo(printable(line), err=err)


def print_json(content: Any) -> None:
    typer.echo(json.dumps(content, indent=1))


def print_table(table: Table | str) -> None:
    """Print a table or a line as wide as the terminal. Elsewhere lines are as long as they need to be, without
    colours."""
    from optpipe_cli.console import Plain, new_console

    console = new_console(width=None if sys.stdout.isatty() else WIDTH)
    with console.capture() as text:
        console.print(Plain(table))
    for line in text.get().splitlines():
        typer.echo(line.rstrip())


def print_rows(rows: Sequence[Mapping[str, Any]], empty: str) -> None:
    """Print a table whose columns are the names of the rows' values; `empty` if there are none."""
    from rich.table import Table

    table = Table(*(rows[0] if rows else [empty]), box=None)
    for row in rows:
        table.add_row(*(f"{v:.6g}" if isinstance(v, float) else printable(v or "") for v in row.values()))
    print_table(table)


def print_figures(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> None:
    """Print a table under its title. Figures stand on the right; the first `names` columns, which have none, left."""
    from rich.table import Table

    table = Table(box=None, title=title, title_justify="left")
    for k, column in enumerate(columns):
        table.add_column(column, no_wrap=True, justify="left" if k < names else "right")
    for row in rows:
        table.add_row(*row)
    print_table(table)


def require_writable(path: Path | None) -> None:
    """Raise `InputError` if the file cannot be written, before a long search whose answer would be lost."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"{path}: is a folder, a file was expected")
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def require_folder(folder: Path | None) -> None:
    """Make the folder if there is none, before a long search. Raise `InputError` if it cannot be made."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be created: {error.strerror}") from None


def figures(result: Result) -> dict[str, Any]:
    """Return a result's figures for people and programs; None for what is not known."""
    from optpipe.schedule import certify

    schedule = result.schedule
    content: dict[str, Any] = {
        "status": result.status,
        "method": result.method or None,
        "makespan_ms": result.makespan_ms,
        "span_ms": result.span_ms,
        "lower_bound_ms": result.lower_bound_ms,
        "gap": result.gap,
        "bubble": schedule.timeline.bubble if schedule else None,
        "time_s": round(result.time_s, 3),
        "placements": result.placements,
    }
    if schedule:
        placement = schedule.placement
        content["placement"] = placement.model_dump(mode="json", exclude_none=True) if placement else None
        certificate = certify(schedule.problem, schedule)
        content["peak_bytes"] = [peak.bytes for peak in certificate.device]
        content["host_peak_bytes"] = [peak.bytes for peak in certificate.host]
    if result.history:
        content["incumbents"] = [asdict(step) for step in result.history]
    if result.reason:
        content["reason"] = result.reason
    if result.notes:
        content["notes"] = list(result.notes)
    return content
