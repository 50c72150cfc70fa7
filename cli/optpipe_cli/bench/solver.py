"""`optpipe bench solver` and `bench jitter`: what `solve` reaches and when, and what its robust search gains."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe_cli.bench.random_problems import random_problem
from optpipe_cli.bench.results import Results, ResultsFile
from optpipe_cli.options import flag, with_options
from optpipe_cli.output import Json, print_json, require_writable

if TYPE_CHECKING:
    from optpipe.anytime import Result
    from optpipe.model.problem import Problem
    from optpipe.options import SolveOptions

MOMENTS = (1.0, 10.0)  # s
EACH = ("method", "time_limit_s", "threads", "seed")  # of which several may be given
OTHER_NOISE = 12_345  # seed of the noise that judges both schedules; neither search has used it


@with_options("SolveOptions", each=EACH)
def solver(
    options: list[SolveOptions],
    problems: Annotated[list[Path] | None, typer.Argument(help="Problem files.")] = None,
    random: Annotated[int, typer.Option(min=0, help="So many random problems, too: all kinds by turns.")] = 0,
    svg: Annotated[Path | None, typer.Option(help="Write a picture of each search's progress here.")] = None,
    results: ResultsFile = None,
    json: Json = False,
) -> None:
    """Measure what `solve` finds and when, start of processes included. Several methods, time limits, numbers of
    threads or seeds, such as `--method auto,dispatch,lns` or `--threads 2,4`, are compared with the first."""
    from optpipe.anytime import solve
    from optpipe.errors import InputError
    from optpipe.model.problem import Problem, write_file
    from optpipe.show.progress import Progress, chart
    from optpipe_solver.systems.variants import is_system

    require_writable(svg)
    for asked in options:
        is_system(asked.method)  # an unknown method is refused before the first search
    loaded = [*map(Problem.load, problems or ()), *map(random_problem, range(random))]
    if not loaded:
        raise InputError("problems: none are given; problem files or --random 22 were expected")
    same = options[0].model_copy(update=dict.fromkeys(EACH))
    kept = Results(results, "solver", ("problem", "sha256", *(f"asked_{name}" for name in EACH)), same)
    rows: list[dict[str, Any]] = []
    for asked in options:
        values = {f"asked_{name}": getattr(asked, name) for name in EACH}
        moments = _moments(asked.time_limit_s)
        if not json:
            after = "".join(f"{f'{moment:g} s':>10}" for moment in (*moments, asked.time_limit_s))
            by = f"by {_search(values, options)}".rstrip()
            typer.echo(f"{'problem':18}{'first: s':>9}{'ms':>10}{after}{'bound':>10}{'gap':>7}  {by}")
        for problem in loaded:
            row = kept.find(problem.name, problem.sha256, *values.values())
            if row is None:
                result = solve(problem, **asked.arguments())
                row = kept.add({"sha256": problem.sha256} | values | _row(problem, result, moments))
            rows.append(row)
            if not json:
                typer.echo(_line(row))
        if random and not json:
            typer.echo(_gaps(rows[-random:]))
    if json:
        print_json(rows)
    elif len(options) > 1:
        typer.echo(_compared([row | {"search": _search(row, options)} for row in rows]))
    if svg:
        searches = [
            Progress(
                f"{row['problem']} {_search(row, options)}".strip(),
                row["steps"],
                row["bound_ms"] or 0.0,
                row["time_s"],
            )
            for row in rows
        ]
        limits = " or ".join(dict.fromkeys(f"{asked.time_limit_s:g}" for asked in options))
        write_file(svg, chart(searches, f"Best schedule over the lower bound, {limits} s each"))


def _search(asked: dict[str, Any], options: list[SolveOptions]) -> str:
    """A search by that in which it differs from others."""
    several = [name for name in EACH if len({getattr(option, name) for option in options}) > 1]
    shown = {name: asked[f"asked_{name}"] for name in several}
    return ", ".join(
        str(value) if name == "method" else f"{flag(name).removeprefix('--')} {value:g}"
        for name, value in shown.items()
    )


def _compared(rows: list[dict[str, Any]]) -> str:
    """By search: the gaps, how long schedules are beside those of the first search, how many are shorter and by how
    much at most. Only of problems for which every search has a schedule."""
    from optpipe.evaluate.objective import shorter

    searches: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        searches.setdefault(row["search"], {})[row["sha256"]] = row
    first, *others = searches.values()
    everywhere = [key for key in first if all(of[key]["gap"] is not None for of in (first, *others))]
    lines = [f"{'search':24}{'problems':>9}{'proven':>8}{'mean gap':>10}{'length':>9}{'shorter':>9}{'at most by':>12}"]
    for search, found in searches.items() if everywhere else ():
        gaps = [found[key]["gap"] for key in everywhere]
        pairs = [(found[key]["best_ms"], first[key]["best_ms"]) for key in everywhere]
        length, least = mean(own / of for own, of in pairs), min(own / of for own, of in pairs)
        lines.append(
            f"{search:24}{len(gaps):>9}{gaps.count(0):>8}{mean(gaps):>10.1%}{length:>9.2%}"
            f"{sum(shorter(own, of) for own, of in pairs):>9}{max(0.0, 1 - least):>12.2%}"
        )
    return "\n".join(lines)


def _gaps(rows: list[dict[str, Any]]) -> str:
    """The gaps of random problems, by kind and of all."""
    gaps = [(row["problem"].partition("-")[0], row["gap"]) for row in rows if row["gap"] is not None]
    kinds = {kind: [gap for other, gap in gaps if other == kind] for kind, _ in gaps}
    lines = [f"{'kind':18}{'problems':>9}{'proven':>8}{'mean gap':>10}{'largest':>9}"]
    for kind, own in (kinds | {"all": [gap for _, gap in gaps]}).items():
        if own:
            proven = sum(gap == 0 for gap in own)
            lines.append(f"{kind:18}{len(own):>9}{proven:>8}{sum(own) / len(own):>10.1%}{max(own):>9.1%}")
    return "\n".join(lines)


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
        "time_s": result.time_s,
        "steps": [(step.time_s, step.value_ms, step.method) for step in result.history],
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
