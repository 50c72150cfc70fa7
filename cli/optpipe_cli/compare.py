"""`optpipe compare`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.printable import printable
from optpipe_cli.options import with_options
from optpipe_cli.output import Json, echo, print_json, print_table, require_folder
from optpipe_cli.why import gain_lines

if TYPE_CHECKING:
    from rich.table import Table

    from optpipe.comparison import Comparison, Row
    from optpipe.model.placement import Placement
    from optpipe.model.problem import Problem
    from optpipe.options import CompareOptions
    from optpipe.schedule import Schedule


@with_options("CompareOptions")
def compare(
    problem: Annotated[
        Path, typer.Argument(metavar="PROBLEM", help="A problem file, or a schedule file: its problem is compared.")
    ],
    options: CompareOptions,
    pictures: Annotated[Path | None, typer.Option(help="Write a picture of each schedule into this folder.")] = None,
    json: Json = False,
) -> None:
    """Compare every published schedule, every heuristic and the solver's answer, and say why one does not fit."""
    posed, given = _problem_and_schedule(problem)
    require_folder(pictures)
    comparison = watched(posed, options, quiet=json)
    if pictures:
        _draw(comparison, pictures)
    if json:
        print_json(comparison.to_dict())
        return
    for line in lines(comparison, posed.name or problem.stem):
        print_table(line)
    if given:
        echo(f"{problem.name}: {given.makespan_ms:.5g} ms, by {given.method or 'hand'}")
    for row in comparison.rows:
        for note in row.result.notes if row.result else ():
            if note != row.reason:
                echo(f"note: {title(row)}: {note}", err=True)


def _problem_and_schedule(path: Path) -> tuple[Problem, Schedule | None]:
    """The problem of a file; of a schedule's also the schedule."""
    from optpipe.files import read_text
    from optpipe.model.problem import Problem
    from optpipe.schedule import Schedule

    if '"optpipe.schedule/' not in read_text(path)[:100]:  # as every schedule file begins
        return Problem.load(path), None
    schedule = Schedule.load(path)
    return schedule.problem, schedule


def watched(
    problem: Problem, options: CompareOptions, quiet: bool = False, starts: Sequence[Schedule] = ()
) -> Comparison:
    """Run `optpipe.compare` with a line on stderr that shows the progress."""
    from optpipe.comparison import compare

    with waiting("comparing", quiet) as say:

        def tell(row: Row) -> None:
            value = f"{row.value_ms:.5g} ms" if row.value_ms is not None else "no schedule"
            say(f"comparing, after {label(row)}: {value}")

        return compare(problem, options.methods, starts=starts, report=tell, **options.search())


@contextmanager
def waiting(text: str, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show a line on stderr during the block, and yield a function that changes it; nothing if stderr is not a
    terminal."""
    from rich.text import Text

    from optpipe_cli.console import new_console

    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    with new_console(stderr=True).status(Text(text)) as status:
        yield lambda text: status.update(Text(printable(text)))


def lines(comparison: Comparison, name: str) -> Iterator[str | Table]:
    """What people read, 80 columns wide: the schedules, what the best one gains and why, and what does not apply."""
    from rich.table import Table

    yield f"{printable(name)}: {_sizes(comparison.problem)}"
    if any(row.schedule for row in comparison.rows):
        yield table(comparison)
        yield ""
        yield "ms; peak of the device whose memory is fullest, where it does not fit: > limit;"
        yield "gap to the best bound of a row's stages"
    before, after = comparison.best_published, comparison.best
    if before and before.schedule and after and after.schedule and comparison.options.objective == "makespan":
        yield from gain_lines(before.schedule, after.schedule)
    if missing := [row for row in comparison.rows if row.schedule is None]:
        yield ""
        yield "no schedule:"
        reasons = Table.grid(padding=(0, 2))
        for row in missing:
            reasons.add_row(title(row), printable(row.reason or ""))
        yield reasons


def table(comparison: Comparison) -> Table:
    """Return the table of all schedules. Rows that do not fit have the figures that they would have."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("method", "makespan", "span", "bubble", "peak", "gap", "stages"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("method", "stages") else "right")
    for row in comparison.rows:
        if row.schedule:
            table.add_row(*_cells(row, row.schedule), style=None if row.fits else "dim")
    return table


def _cells(row: Row, schedule: Schedule) -> list[str]:
    return [
        label(row),
        f"{row.makespan_ms:.5g}",
        f"{row.span_ms:.5g}",
        f"{row.bubble:.1%}",
        _peak(row),
        "" if row.gap is None else f"{row.gap:.1%}",
        _stages(schedule.placement),
    ]


def _peak(row: Row) -> str:
    """The memory of the fullest device; where it, or its host memory, does not suffice also the limit."""
    from optpipe.comparison import fullest
    from optpipe.sizes import bytes_text, told_apart

    assert row.certificate is not None
    peak, host = (fullest(peaks)[1] for peaks in (row.certificate.device, row.certificate.host))
    if row.fits or (peak.fits and host.fits):
        return bytes_text(peak.bytes)
    needed, limit = told_apart(*(host.bytes, host.limit or 0) if peak.fits else (peak.bytes, peak.limit or 0))
    number, unit = needed.split()
    return f"{'host ' if peak.fits else ''}{number if limit.endswith(f' {unit}') else needed} > {limit}"


def _stages(placement: Placement | None) -> str:
    """How many stages a device has and how they are placed, in two words."""
    from optpipe.model.placement import NAMES

    if placement is None:
        return "as given"
    return (
        f"{placement.chunks} {NAMES[placement.shape]}"
        if placement.chunks > 1 or placement.shape == "bidirectional"
        else "1"
    )


def label(row: Row) -> str:
    """Return for example `auto, any (lns)`: rows of searches also name the engine that found the schedule."""
    from optpipe.comparison import is_search

    return f"{title(row)} ({row.schedule.method})" if row.schedule and is_search(row.method) else title(row)


def title(row: Row) -> str:
    """Return the method, and for rows of searches whether the stages were free."""
    from optpipe.comparison import is_search

    return f"{row.method}, any" if is_search(row.method) and row.placements == "all" else row.method


def _sizes(problem: Problem) -> str:
    from optpipe.model.offload import offload_ratio

    ratios = sorted({round(ratio, 9) for ratio in offload_ratio(problem) if ratio is not None})
    least_and_most = " to ".join(f"{ratio:.3g}" for ratio in dict.fromkeys((*ratios[:1], *ratios[-1:])))
    k = f"k = {least_and_most}" if ratios else "no stage can be offloaded"
    return f"{len(problem.devices)} devices, {len(problem.stages)} stages, {problem.microbatches} micro-batches, {k}"


def _draw(comparison: Comparison, folder: Path) -> None:
    from optpipe.files import write_file
    from optpipe.show.svg import gantt

    for row in comparison.rows:
        if row.schedule:
            name = re.sub(r"[^a-z0-9]+", "-", title(row))
            write_file(
                folder / f"{name}.svg", gantt(row.schedule, f"{comparison.problem.name} · {label(row)}".lstrip(" ·"))
            )
