"""Every published schedule and the solver's at several memory budgets."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.table import Table

from benchmarks.problems import with_budget
from optpipe.comparison import SOLVER, Comparison, Row, compare, solve_from
from optpipe.errors import InputError
from optpipe.evaluate.objective import shorter
from optpipe.model.problem import Problem
from optpipe.options import CompareOptions, SolveOptions
from optpipe.schedule import Schedule
from optpipe.show.pareto import Point, chart, frontier
from optpipe.text import bytes_text
from optpipe_cli.compare import title, watched
from optpipe_cli.options import NewFile, Options
from optpipe_cli.output import print_table, waiting
from optpipe_solver.compare import EVERY

AMPLE = "ample"

Comparisons = dict[str, Comparison]  # by budget


class Verdict(NamedTuple):
    text: str
    solver_is_behind: bool


def pareto(
    problem: Path,
    /,
    *,
    options: Options[CompareOptions] = CompareOptions(),
    budgets: str = "ample,0.5,0.2",
    html: NewFile = None,
) -> None:
    """Compare all methods at several memory budgets.

    There are two searches at each budget. Then compare the solver with each published schedule on the frontier, at its
    memory. Exit code 1 if the solver is behind.

    Parameters
    ----------
    problem
        A problem file. Its own memory budgets are ignored.
    budgets
        Shares of M, the memory of 1F1B's fullest device; ample: memory for every activation.
    html
        Write a page with the picture, memory against makespan, here.
    """
    posed = Problem.load(problem)
    sizes = _sizes(posed, budgets)
    by_budget, between = _compared(posed, sizes, options)
    told = [verdict for name, comparison in by_budget.items() for verdict in verdicts(name, comparison)]
    told += [_verdict(f"{bytes_text(point.bytes)}, any stages", row, point) for point, row in between.items()]
    if html:
        series = {
            "OptPipe, any stages": _points(by_budget, list(between.values()), solver=True),
            "OptPipe, the stages as given": _points(by_budget, [], solver=True, free="keep"),
        }
        title = f"{posed.name}: memory against makespan"
        chart(_points(by_budget, [], solver=False), series, sizes, title).save(html)
    print_table(table(by_budget, sizes))
    for verdict in told:
        print(verdict.text)
    if any(verdict.solver_is_behind for verdict in told):
        raise SystemExit(1)


def _sizes(problem: Problem, budgets: str) -> dict[str, int]:
    """Bytes of each budget by its name."""
    (steady,) = compare(problem, ["1f1b"]).rows
    if steady.peak is None:
        raise InputError(f"1f1b, whose memory budgets are shares of: {steady.reason}")
    assert steady.certificate is not None
    most = max(peak.bytes for peak in steady.certificate.device)
    costs = problem.costs
    held = np.maximum(costs.activation, costs.saved_for_weight).max(axis=1)
    whole = int(max(held[problem.stages_on(d)].sum() for d in range(len(problem.devices))))
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


def _compared(problem: Problem, sizes: dict[str, int], options: CompareOptions) -> tuple[Comparisons, dict[Point, Row]]:
    """All methods at each budget, and the solver on any stages with the memory of each schedule on the published
    frontier that is none of the budgets.

    The solver goes from less memory to more and starts from what it found with less, so more never makes it longer.
    """

    def published(size: int) -> Comparison:
        return compare(with_budget(problem, size), EVERY, **options.search())

    with waiting("making the published schedules"):
        by_budget = {name: published(size) for name, size in sizes.items()}
    corners = [point for point in frontier(_points(by_budget, [], solver=False)) if point.bytes not in sizes.values()]
    searches: list[tuple[int, str | Point]] = [(size, name) for name, size in sizes.items()]
    searches += [(point.bytes, point) for point in corners]
    between: dict[Point, Row] = {}
    with_less_memory: list[Schedule] = []  # what searches with less memory have found
    for size, where in sorted(searches, key=lambda search: search[0]):
        posed = with_budget(problem, size)
        if isinstance(where, str):
            rows = watched(posed, options.model_copy(update={"methods": [SOLVER]}), starts=with_less_memory).rows
            by_budget[where] = Comparison.from_rows(posed, options, [*by_budget[where].rows, *rows])
        else:
            with waiting(f"searching at the memory of {where.name}"):
                result = solve_from(with_less_memory, posed, SolveOptions.model_validate(options.search()))
            rows = (Row(SOLVER, "all", result, None if result.schedule else result.reason),)
            between[where] = rows[0]
        with_less_memory += [row.schedule for row in rows if row.schedule]
    return by_budget, between


def verdicts(budget: str, comparison: Comparison) -> list[Verdict]:
    """Compare the solver with the others at one budget: on any stages with all that fit, on the given stages with those
    on them."""
    told = []
    for free, stages in (("all", "any stages"), ("keep", "the stages as given")):
        solver = next(row for row in comparison.rows if row.method == SOLVER and row.placements == free)
        others = [row for row in comparison.rows if row.method != SOLVER and row.fits]
        rivals = [row for row in others if free == "all" or _has_given_stages(row)]
        if best := min(_as_points(rivals), key=lambda point: point.ms, default=None):
            told.append(_verdict(f"{budget}, {stages}", solver, best))
    return told


def _verdict(where: str, solver: Row, best: Point) -> Verdict:
    ms = float("inf") if solver.makespan_ms is None else solver.makespan_ms
    behind = shorter(best.ms, ms)
    place = "BEHIND" if behind else "ahead of" if shorter(ms, best.ms) else "on"
    return Verdict(f"{where}: {place} the frontier, {ms:.6g} ms against {best.ms:.6g} ms by {best.name}", behind)


def _has_given_stages(row: Row) -> bool:
    return row.schedule is not None and row.schedule.placement is None


def table(by_budget: Comparisons, sizes: dict[str, int]) -> Table:
    """Return a table with a row per method: its makespan and the peak of its fullest device at each budget, if it
    fits."""
    shown = Table(box=None, pad_edge=False)
    shown.add_column("method", no_wrap=True)
    for name, size in sizes.items():
        shown.add_column(f"{name}: {bytes_text(size)}", no_wrap=True, justify="right")
        shown.add_column("peak", no_wrap=True, justify="right")
    cells: dict[str, list[str]] = {}
    for comparison in by_budget.values():
        for row in comparison.rows:
            figures = [f"{row.makespan_ms:.6g}", bytes_text(row.peak[1].bytes)] if row.fits and row.peak else ["–", ""]
            cells.setdefault(title(row), []).extend(figures)
    for name, texts in cells.items():
        shown.add_row(name, *texts)
    return shown


def _points(by_budget: Comparisons, further: list[Row], *, solver: bool, free: str = "all") -> list[Point]:
    rows = [row for comparison in by_budget.values() for row in comparison.rows]
    return _as_points([row for row in rows if (row.method == SOLVER, row.placements) == (solver, free)] + further)


def _as_points(rows: list[Row]) -> list[Point]:
    """The points of the rows that fit."""
    return [
        Point(row.schedule.method, max(peak.bytes for peak in row.certificate.device), row.schedule.makespan_ms)
        for row in rows
        if row.fits and row.schedule and row.certificate
    ]
