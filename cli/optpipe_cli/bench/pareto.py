"""`optpipe bench pareto`: every published schedule and the solver's at several memory budgets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.errors import InputError
from optpipe.evaluate.objective import shorter
from optpipe_cli.compare import title, waiting, watched
from optpipe_cli.options import with_options
from optpipe_cli.output import Json, print_json, print_table, require_writable

if TYPE_CHECKING:
    from rich.table import Table

    from optpipe.comparison import Comparison, Row
    from optpipe.model.problem import Problem
    from optpipe.options import CompareOptions
    from optpipe.schedule import Schedule
    from optpipe.show.pareto import Point

AMPLE = "ample"

Found = dict[str, "Comparison"]  # by budget
Verdict = tuple[str, bool]  # what to say, and whether the solver is behind


@with_options("CompareOptions", only=("time_limit_s", "threads", "memory_mib", "seed", "solver"))
def pareto(
    problem: Annotated[Path, typer.Argument(help="A problem file. Its own memory budgets are ignored.")],
    options: CompareOptions,
    budgets: Annotated[
        str, typer.Option(help="Shares of M, the memory of 1F1B's fullest device; ample: memory for every activation.")
    ] = "ample,0.5,0.2",
    svg: Annotated[Path | None, typer.Option(help="Write a picture, memory against makespan, here.")] = None,
    json: Json = False,
) -> None:
    """Compare all methods at several memory budgets.

    There are two searches at each budget. Then compare the solver with each published schedule on the frontier, at its
    memory. Exit code 1 if the solver is behind.
    """
    from optpipe.model.problem import Problem, write_file
    from optpipe.show.svg import bytes_text

    require_writable(svg)
    what = Problem.load(problem)
    sizes = _sizes(what, budgets)
    found, between = _compared(what, sizes, options, quiet=json)
    told = [verdict for name in found for verdict in verdicts(name, found[name])]
    told += [_verdict(f"{bytes_text(point.bytes)}, any stages", row, point) for point, row in between.items()]
    if svg:
        write_file(svg, _picture(what, found, sizes, list(between.values())))
    if json:
        rows = {name: [row.to_dict() for row in one.rows] for name, one in found.items()}
        corners = [
            {"activation_budget_bytes": point.bytes, "published": point.name, **row.to_dict()}
            for point, row in between.items()
        ]
        print_json(
            {
                "problem": what.name,
                "budgets": sizes,
                "rows": rows,
                "between": corners,
                "behind": [text for text, behind in told if behind],
            }
        )
    else:
        print_table(table(found, sizes))
        for text, _ in told:
            typer.echo(text)
    if any(behind for _, behind in told):
        raise typer.Exit(1)


def _sizes(problem: Problem, budgets: str) -> dict[str, int]:
    """Bytes of each budget by its name."""
    from optpipe.comparison import compare

    (steady,) = compare(problem, ["1f1b"]).rows
    if steady.peak is None:
        raise InputError(f"1f1b, whose memory budgets are shares of: {steady.reason}")
    assert steady.certificate is not None
    most = max(peak.bytes for peak in steady.certificate.device)
    held = [max(stage.activation_bytes, stage.saved_for_weight_bytes) for stage in problem.stages]
    whole = max(sum(held[s] for s in problem.stages_on(d)) for d in range(len(problem.devices)))
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
    return problem.replace(
        devices=[device.model_copy(update={"activation_budget_bytes": size}) for device in problem.devices]
    )


def _compared(
    problem: Problem, sizes: dict[str, int], options: CompareOptions, quiet: bool
) -> tuple[Found, dict[Point, Row]]:
    """All methods at each budget, and the solver on any stages with the memory of each schedule on the published
    frontier that is none of the budgets.

    The solver goes from less memory to more and starts from what it found with less, so more never makes it longer.
    """
    from optpipe.comparison import SOLVER, Comparison, Row, compare, solve_from
    from optpipe.show.pareto import frontier
    from optpipe_solver.portfolio.compare_methods import EVERY

    def published(size: int) -> Comparison:
        return compare(_with_memory(problem, size), EVERY, **options.search())

    with waiting("making the published schedules", quiet):
        found = {name: published(size) for name, size in sizes.items()}
    corners = [point for point in frontier(_points(found, [], solver=False)) if point.bytes not in sizes.values()]
    searches: list[tuple[int, str | Point]] = [(size, name) for name, size in sizes.items()]
    searches += [(point.bytes, point) for point in corners]
    between: dict[Point, Row] = {}
    known: list[Schedule] = []  # what searches with less memory have found
    for size, where in sorted(searches, key=lambda search: search[0]):
        posed = _with_memory(problem, size)
        if isinstance(where, str):
            rows = watched(posed, options.model_copy(update={"methods": [SOLVER]}), quiet, known).rows
            found[where] = Comparison.of(posed, options, [*found[where].rows, *rows])
        else:
            with waiting(f"searching at the memory of {where.name}", quiet):
                result = solve_from(known, posed, **options.search())
            rows = (Row(SOLVER, "all", result, None if result.schedule else result.reason),)
            between[where] = rows[0]
        known += [row.schedule for row in rows if row.schedule]
    return found, between


def verdicts(budget: str, found: Comparison) -> list[Verdict]:
    """Compare the solver with the others at one budget: on any stages with all that fit, on the given stages with those
    on them."""
    from optpipe.comparison import SOLVER

    told = []
    for free, stages in (("all", "any stages"), ("keep", "the stages as given")):
        own = next(row for row in found.rows if row.method == SOLVER and row.placements == free)
        rivals = [row for row in found.rows if row.method != SOLVER and row.fits and (free == "all" or _as_given(row))]
        if best := min(_as_points(rivals), key=lambda point: point.ms, default=None):
            told.append(_verdict(f"{budget}, {stages}", own, best))
    return told


def _verdict(where: str, own: Row, best: Point) -> Verdict:
    mine = float("inf") if own.makespan_ms is None else own.makespan_ms
    behind = shorter(best.ms, mine)
    place = "BEHIND" if behind else "ahead of" if shorter(mine, best.ms) else "on"
    return f"{where}: {place} the frontier, {mine:.6g} ms against {best.ms:.6g} ms by {best.name}", behind


def _as_given(row: Row) -> bool:
    return row.schedule is not None and row.schedule.placement is None


def table(found: Found, sizes: dict[str, int]) -> Table:
    """Return a table with a row per method: its makespan and the peak of its fullest device at each budget, if it
    fits."""
    from rich.table import Table

    from optpipe.show.svg import bytes_text

    shown = Table(box=None, pad_edge=False)
    shown.add_column("method", no_wrap=True)
    for name, size in sizes.items():
        shown.add_column(f"{name}: {bytes_text(size)}", no_wrap=True, justify="right")
        shown.add_column("peak", no_wrap=True, justify="right")
    cells: dict[str, list[str]] = {}
    for one in found.values():
        for row in one.rows:
            own = [f"{row.makespan_ms:.6g}", bytes_text(row.peak[1].bytes)] if row.fits and row.peak else ["–", ""]
            cells.setdefault(title(row), []).extend(own)
    for name, texts in cells.items():
        shown.add_row(name, *texts)
    return shown


def _picture(problem: Problem, found: Found, sizes: dict[str, int], between: list[Row]) -> str:
    from optpipe.show.pareto import chart

    series = {
        "OptPipe, any stages": _points(found, between, solver=True),
        "OptPipe, the stages as given": _points(found, [], solver=True, free="keep"),
    }
    return chart(_points(found, [], solver=False), series, sizes, f"{problem.name}: memory against makespan")


def _points(found: Found, more: list[Row], *, solver: bool, free: str = "all") -> list[Point]:
    from optpipe.comparison import SOLVER

    rows = [
        row for one in found.values() for row in one.rows if (row.method == SOLVER, row.placements) == (solver, free)
    ]
    return _as_points([*rows, *more])


def _as_points(rows: list[Row]) -> list[Point]:
    """The points of the rows that fit."""
    from optpipe.show.pareto import Point

    return [
        Point(row.schedule.method, max(peak.bytes for peak in row.certificate.device), row.schedule.makespan_ms)
        for row in rows
        if row.fits and row.schedule and row.certificate
    ]
