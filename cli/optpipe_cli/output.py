"""What commands print: figures as text or, with `--json`, as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from optpipe.errors import InputError
from optpipe.model.problem import Problem
from optpipe.printable import printable
from optpipe_cli.terminal import Plain, new_console

ProblemPath = Annotated[Path, Parameter(help="A problem file.")]
SchedulePath = Annotated[Path, Parameter(help="A schedule file.")]
Flag = Annotated[bool, Parameter(negative="")]  # one that is only switched on
Json = Annotated[Flag, Parameter(help="Print JSON instead of text.")]
NoCache = Annotated[Flag, Parameter(help="Neither look schedules up nor store them.")]
INFEASIBLE = 3  # exit code
WIDTH = 250  # characters of a line if the output is not a terminal, so that nothing is wrapped


def require_writable(_: Any, path: Path | None) -> None:
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


def require_folder(_: Any, folder: Path | None) -> None:
    """Make the folder if there is none, before a long search. Raise `InputError` if it cannot be made."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be created: {error.strerror}") from None


NewFile = Annotated[Path | None, Parameter(validator=require_writable)]
NewFolder = Annotated[Path | None, Parameter(validator=require_folder)]
Output = Annotated[NewFile, Parameter(name=("--output", "-o"), help="The file to write.")]
FolderOutput = Annotated[NewFolder, Parameter(name=("--output", "-o"), help="The folder for files to write.")]


def echo(line: object = "", err: bool = False) -> None:
    """Print one line; what a terminal would obey or break in it is made visible."""
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
