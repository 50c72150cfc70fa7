"""`optpipe bench pareto`: every published schedule and the solver's at several memory budgets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.compare import WIDTH, figures, title, watched
from optpipe.cli.output import Json, print_json, require_writable
from optpipe.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from optpipe.comparison import Comparison, Row
    from optpipe.problem import Problem

AMPLE = "ample"
BEHIND = 1 + 1e-9

Found = dict[str, "Comparison"]  # by budget


def pareto(
    problem: Annotated[Path, typer.Argument(help="A problem file, whose own memory does not count.")],
    budgets: Annotated[
        str, typer.Option(help="Shares of M, what 1F1B needs on its fullest device; ample: room for every activation.")
    ] = "ample,0.5,0.2",
    time_limit: Annotated[float, typer.Option(help="Seconds for each of two searches at each budget.", min=0.01)] = 10.0,
    threads: Annotated[int | None, typer.Option(help="Of the solver. Default: all cores.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture, memory against makespan, here.")] = None,
    json: Json = False,
) -> None:
    """Compare all methods at several memory budgets; exit code 1 where the solver is behind the frontier of what is published."""
    from optpipe.problem import Problem, write_file

    require_writable(svg)
    what = Problem.load(problem)
    sizes = _sizes(what, budgets)
    found = {name: watched(_with_memory(what, size), None, time_limit, threads, "all", quiet=json) for name, size in sizes.items()}
    told = [verdict for name in found for verdict in verdicts(name, found[name])]
    if svg:
        write_file(svg, _picture(what, found, sizes))
    if json:
        rows = {name: [figures(row) for row in one.rows] for name, one in found.items()}
        print_json({"problem": what.name, "budgets": sizes, "rows": rows, "behind": [text for text, behind in told if behind]})
    else:
        from rich.console import Console

        console = Console(width=None if sys.stdout.isatty() else WIDTH)
        console.print(_table(found, sizes))
        for text, _ in told:
            typer.echo(text)
    if any(behind for _, behind in told):
        raise typer.Exit(1)


def _sizes(problem: Problem, budgets: str) -> dict[str, int]:
    """Bytes of each budget, by its name."""
    from optpipe.comparison import compare

    (steady,) = compare(problem, ["1f1b"]).rows
    if steady.peak is None:
        raise InputError(f"1f1b, whose memory budgets are shares of: {steady.reason}")
    assert steady.certificate is not None
    most = max(peak.bytes for peak in steady.certificate.device)
    whole = max(sum(problem.stages[s].activation_bytes for s in problem.stages_on(d)) for d in range(len(problem.devices)))
    sizes = {}
    for budget in budgets.split(","):
        if budget == AMPLE:
            sizes[AMPLE] = whole * problem.microbatches
            continue
        try:
            share = float(budget)
        except ValueError:
            share = -1.0
        if not 0 < share < 1000:
            raise InputError(f"budgets: {budget!r}: expected shares of M above 0, or {AMPLE}")
        sizes[f"{share:g} M"] = round(share * most)
    return sizes


def _with_memory(problem: Problem, size: int) -> Problem:
    return problem.replace(devices=[device.model_copy(update={"memory_bytes": size}) for device in problem.devices])


def verdicts(budget: str, found: Comparison) -> list[tuple[str, bool]]:
    """At one budget, the solver on any stages against all that fits, and on the given ones against what runs on these: what to say, and
    whether it is behind."""
    from optpipe.comparison import SOLVER

    told = []
    for free in ("all", "keep"):
        own = next(row for row in found.rows if row.method == SOLVER and row.placements == free)
        rivals = [row for row in found.rows if row.method != SOLVER and row.fits and (free == "all" or _as_given(row))]
        best = min(rivals, key=lambda row: row.makespan_ms or 0.0, default=None)
        if best is None or best.makespan_ms is None:
            continue
        mine = float("inf") if own.makespan_ms is None else own.makespan_ms
        behind = mine > best.makespan_ms * BEHIND
        stages = "any stages" if free == "all" else "the stages as given"
        where = "BEHIND" if behind else "ahead of" if mine * BEHIND < best.makespan_ms else "on"
        told.append((f"{budget}, {stages}: {where} the frontier, {mine:.6g} ms against {best.makespan_ms:.6g} ms by {best.method}", behind))
    return told


def _as_given(row: Row) -> bool:
    return row.schedule is not None and row.schedule.placement is None


def _table(found: Found, sizes: dict[str, int]) -> Table:
    """A row a method, at each budget its makespan and the peak of the device whose memory is fullest; no figures where it does not fit."""
    from rich.table import Table

    from optpipe.show.svg import bytes_text

    table = Table(box=None, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for name, size in sizes.items():
        table.add_column(f"{name}: {bytes_text(size)}", no_wrap=True, justify="right")
        table.add_column("peak", no_wrap=True, justify="right")
    cells: dict[str, list[str]] = {}
    for one in found.values():
        for row in one.rows:
            own = [f"{row.makespan_ms:.6g}", bytes_text(row.peak[1].bytes)] if row.fits and row.peak else ["–", ""]
            cells.setdefault(title(row), []).extend(own)
    for name, texts in cells.items():
        table.add_row(name, *texts)
    return table


def _picture(problem: Problem, found: Found, sizes: dict[str, int]) -> str:
    from optpipe.comparison import SOLVER
    from optpipe.show.pareto import Point, chart

    def points(solver: bool, free: str = "all") -> list[Point]:
        fitting = [
            row for one in found.values() for row in one.rows if row.fits and (row.method == SOLVER, row.placements) == (solver, free)
        ]
        return [Point(row.schedule.method, row.peak[1].bytes, row.schedule.makespan_ms) for row in fitting if row.schedule and row.peak]

    series = {"OptPipe, any stages": points(True), "OptPipe, the stages as given": points(True, "keep")}
    return chart(points(False), series, sizes, f"{problem.name}: memory against makespan")
