"""`optpipe compare`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe.errors import InputError
from optpipe_cli.output import Json, print_json
from optpipe_cli.solve import Placements

if TYPE_CHECKING:
    from rich.table import Table

    from optpipe.comparison import Comparison, Row
    from optpipe.model.placement import Placement
    from optpipe.model.problem import Problem

WIDTH = 250  # characters, where the output is no terminal: nothing is wrapped
Methods = Annotated[
    str | None, typer.Option(help="Some of them, e.g. 1f1b,gis:group=5,auto; auto is what solve finds. Default: all.")
]


def compare(
    problem: Annotated[Path, typer.Argument(help="A problem file.")],
    methods: Methods = None,
    time_limit: Annotated[float, typer.Option(help="Seconds for each search of the solver's.")] = 10.0,
    threads: Annotated[int | None, typer.Option(help="Of the solver. Default: all cores.")] = None,
    placements: Annotated[
        Placements,
        typer.Option(
            help="all: each system on the stages that it is for, the solver on any. keep: on the stages as given."
        ),
    ] = Placements.all,
    pictures: Annotated[Path | None, typer.Option(help="Write a picture of each schedule into this folder.")] = None,
    json: Json = False,
) -> None:
    """Put every published schedule, every heuristic and the solver's answer side by side, or say why one does not
    fit."""
    from optpipe.model.problem import Problem

    what, asked = Problem.load(problem), None if methods is None else names(methods)
    if pictures:
        _require_folder(pictures)
    found = watched(what, asked, time_limit, threads, placements.value, quiet=json)
    if pictures:
        _draw(found, pictures)
    if json:
        print_json(found.to_dict())
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(f"{what.name or problem.stem}: {_sizes(what)}", highlight=False)
    console.print(table(found))


def names(methods: str) -> list[str]:
    """What stands between commas, but for those between the parameters of one method."""
    return [name.strip() for name in re.split(r",(?![a-z]+=)", methods)]


def watched(
    problem: Problem, methods: list[str] | None, time_limit: float, threads: int | None, placements: Any, quiet: bool
) -> Comparison:
    """`optpipe.compare`; meanwhile a line on stderr says what has been found."""
    from optpipe.comparison import compare

    with waiting("comparing", quiet) as say:

        def tell(row: Row) -> None:
            value = f"{row.makespan_ms:.6g} ms" if row.makespan_ms is not None else row.reason
            say(f"comparing, after {label(row)}: {value}")

        return compare(problem, methods, time_limit, threads=threads, placements=placements, told=tell)


@contextmanager
def waiting(text: str, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line on stderr while something takes its time, which may be told anew; none where nobody looks."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    with console.status(text) as status:
        yield status.update


def table(found: Comparison) -> Table:
    """For people: figures of those that do not fit are what they would be."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("method", "makespan", "span", "bubble", "peak", "gap", "stages"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("method", "stages") else "right")
    table.add_column()  # why not
    for row in found.rows:
        table.add_row(*_cells(row), style=None if row.fits else "dim")
    return table


def _cells(row: Row) -> list[str]:
    from optpipe.show.svg import bytes_text

    if row.schedule is None:
        return [label(row), *[""] * 6, row.reason or ""]
    assert row.peak is not None
    return [
        label(row),
        f"{row.makespan_ms:.6g}",
        f"{row.span_ms:.6g}",
        f"{row.bubble:.1%}",
        bytes_text(row.peak[1].bytes),
        "" if row.gap is None else f"{row.gap:.1%}",
        _stages(row.schedule.placement),
        row.reason or "",
    ]


def _stages(placement: Placement | None) -> str:
    """In two words: how many a device and how they lie."""
    from optpipe.model.placement import NAMES

    if placement is None:
        return "as given"
    return (
        f"{placement.chunks} {NAMES[placement.shape]}"
        if placement.chunks > 1 or placement.shape == "bidirectional"
        else "1"
    )


def label(row: Row) -> str:
    """`auto, any (lns)`: the solver's rows also say what found them."""
    from optpipe.comparison import SOLVER

    return f"{title(row)} ({row.schedule.method})" if row.schedule and row.method == SOLVER else title(row)


def title(row: Row) -> str:
    """The method; of the solver's rows, whether stages were free."""
    from optpipe.comparison import SOLVER

    return f"{row.method}, any" if row.method == SOLVER and row.placements == "all" else row.method


def _sizes(problem: Problem) -> str:
    devices, stages = len(problem.devices), len(problem.stages)
    known = sorted({round(ratio, 9) for ratio in _ratios(problem) if ratio is not None})
    k = (
        ", no stage can be offloaded"
        if not known
        else f", k = {' to '.join(f'{ratio:.3g}' for ratio in dict.fromkeys((known[0], known[-1])))}"
    )
    return (
        f"{devices} devices, {stages} stages, {problem.microbatches} micro-batches{k}; ms, peak of the device "
        "whose memory is fullest"
    )


def _ratios(problem: Problem) -> list[float | None]:
    from optpipe.model.offload import offload_ratio

    return offload_ratio(problem)


def _require_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made: {error.strerror}") from None


def _draw(found: Comparison, folder: Path) -> None:
    from optpipe.model.problem import write_file
    from optpipe.show.svg import gantt

    for row in found.rows:
        if row.schedule:
            name = re.sub(r"[^a-z0-9]+", "-", title(row))
            write_file(folder / f"{name}.svg", gantt(row.schedule, f"{found.problem.name} · {label(row)}".lstrip(" ·")))
