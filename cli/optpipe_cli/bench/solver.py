"""`optpipe bench solver` and `bench jitter`: what `solve` reaches and when, and what its robust search gains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe_cli.options import with_options
from optpipe_cli.output import Json, print_json, require_writable

if TYPE_CHECKING:
    from optpipe.anytime import Result
    from optpipe.model.problem import Problem
    from optpipe.options import SolveOptions

MOMENTS = (1.0, 10.0)  # s
OTHER_NOISE = 12_345  # seed of the noise that judges both schedules; neither search has used it


@with_options("SolveOptions")
def solver(
    problems: Annotated[list[Path], typer.Argument(help="Problem files.")],
    options: SolveOptions,
    svg: Annotated[Path | None, typer.Option(help="Write a picture of each search's progress here.")] = None,
    json: Json = False,
) -> None:
    """Measure what `solve` finds and when, start of processes included."""
    from optpipe.anytime import solve
    from optpipe.model.problem import Problem, write_file
    from optpipe.show.progress import Progress, chart

    require_writable(svg)
    loaded = [Problem.load(path) for path in problems]
    rows, searches, time_limit = [], [], options.time_limit_s
    if not json:
        moments = "".join(f"{f'{moment:g} s':>10}" for moment in (*_moments(time_limit), time_limit))
        typer.echo(f"{'problem':18}{'first: s':>9}{'ms':>10}{moments}{'bound':>10}{'gap':>7}  by")
    for problem in loaded:
        result = solve(problem, **options.arguments())
        rows.append(row := _row(problem, result, _moments(time_limit)))
        steps = [(step.time_s, step.value_ms, step.method) for step in result.history]
        searches.append(Progress(problem.name, steps, result.lower_bound_ms or 0.0, result.time_s))
        if not json:
            typer.echo(_line(row))
    if json:
        print_json(rows)
    if svg:
        write_file(svg, chart(searches, f"Best schedule over the lower bound, {time_limit:g} s each"))


def _moments(time_limit: float) -> list[float]:
    return [moment for moment in MOMENTS if moment < time_limit]


def _row(problem: Problem, result: Result, moments: list[float]) -> dict[str, Any]:
    found = [(step.time_s, step.value_ms) for step in result.history]
    after = {
        f"ms_after_{moment:g}_s": min((ms for at, ms in found if at <= moment), default=None) for moment in moments
    }
    return {
        "problem": problem.name,
        "first_s": found[0][0] if found else None,
        "first_ms": found[0][1] if found else None,
        **after,
        "best_ms": result.value_ms,
        "bound_ms": result.lower_bound_ms,
        "gap": result.gap,
        "status": result.status,
        "method": result.method,
        "reason": result.reason,
        "notes": result.notes,
    }


def _line(row: dict[str, Any]) -> str:
    figures = [value for name, value in row.items() if name.endswith("_ms") or name.startswith("ms_after")]
    shown = "".join(f"{'–' if value is None else f'{value:.6g}':>10}" for value in figures)
    first, gap = row["first_s"], row["gap"]
    end = f"{'–' if gap is None else f'{gap:.1%}':>7}  {row['method'] or row['reason']}"
    return f"{row['problem'][:17]:18}{'–' if first is None else f'{first:.2f}':>9}{shown}{end}"


@with_options("SolveOptions", jitter=0.05)
def jitter(
    problems: Annotated[list[Path], typer.Argument(help="Problem files.")],
    options: SolveOptions,
    json: Json = False,
) -> None:
    """Measure by two searches what `solve --jitter` gains, under other noise than the search's."""
    from optpipe.anytime import solve
    from optpipe.evaluate.jitter import percentile_ms
    from optpipe.model.problem import Problem

    loaded = [Problem.load(path) for path in problems]
    rows = []
    if not json:
        typer.echo(f"{'':18}{'nominal search':>20}{'with --jitter':>20}")
        typer.echo(f"{'problem':18}{'ms':>10}{'95%':>10}{'ms':>10}{'95%':>10}{'gain':>8}{'of noise':>10}")
    for problem in loaded:
        row: dict[str, Any] = {"problem": problem.name}
        for name, noise in (("nominal", 0.0), ("robust", options.jitter)):
            asked = options.model_copy(update={"jitter": noise})
            result = solve(problem, **asked.arguments())
            row[f"{name}_ms"] = result.objective_ms
            row[f"{name}_percentile_ms"] = (
                percentile_ms(result.schedule, options.jitter, options.objective, OTHER_NOISE)
                if result.schedule
                else None
            )
        rows.append(row)
        if not json:
            typer.echo(_gain(row))
    if json:
        print_json(rows)


def _gain(row: dict[str, Any]) -> str:
    name, *figures = row.values()
    if None in figures:
        return f"{name[:17]:18}no schedule"
    nominal, before, _, after = figures
    shown = "".join(f"{value:>10.6g}" for value in figures)
    return f"{name[:17]:18}{shown}{1 - after / before:>8.2%}{(before - after) / ((before - nominal) or 1.0):>10.1%}"
