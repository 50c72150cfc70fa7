"""`optpipe solve`."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe.cli.output import INFEASIBLE, Json, figures, print_json, require_writable, summary

if TYPE_CHECKING:
    from optpipe.anytime import Result, Search
    from optpipe.files import Found
    from optpipe_cache import Cache


class Objective(StrEnum):
    makespan = "makespan"
    span = "span"


def solve(
    problem: Annotated[Path, typer.Argument(help="A problem file.")],
    method: Annotated[
        str, typer.Option(help="auto, an engine (cyclic, milp) or one heuristic (naive, gpipe, 1f1b, po-f, zb, adaoffload).")
    ] = "auto",
    time_limit: Annotated[float, typer.Option(help="Seconds.")] = 60.0,
    threads: Annotated[int | None, typer.Option(help="Default: all cores.")] = None,
    objective: Annotated[Objective, typer.Option(help="makespan, or span: the longest time of one device.")] = Objective.makespan,
    warm_start: Annotated[Path | None, typer.Option(help="A schedule file to start from.")] = None,
    seed: Annotated[int, typer.Option(help="For the search's random choices.")] = 0,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Neither look the problem up nor keep the answer.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the schedule file here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with its picture here.")] = None,
    json: Json = False,
) -> None:
    """Find the best schedule within the time. Ctrl-C ends the search and keeps the best so far."""
    from optpipe.anytime import Result, improve
    from optpipe.problem import Problem
    from optpipe.schedule import Schedule

    require_writable(output)
    require_writable(html)
    what = Problem.load(problem)
    start = Schedule.load(warm_start) if warm_start else None
    cache = None if no_cache else _cache()
    hit = cache.lookup(what, objective.value) if cache and start is None and method == "auto" else None
    if hit and hit.status == "optimal":
        result = Result("optimal", hit.schedule, objective.value, hit.lower_bound_ms, f"{hit.schedule.method} (cached)")
    else:
        start = start or (hit.schedule if hit else None)
        search = improve(
            what, method=method, time_limit=time_limit, threads=threads, objective=objective.value, warm_start=start, seed=seed
        )
        result = _follow(search, time_limit, quiet=json)
    if cache and result.schedule:
        cache.add(result.schedule, _found(result), result.lower_bound_ms, objective.value)
    _deliver(result, output, html, json)


def _cache() -> Cache:
    from optpipe_cache import Cache, default_path

    return Cache(default_path())


def _found(result: Result) -> Found:
    return "optimal" if result.status == "optimal" else "feasible"


def _follow(search: Search, time_limit: float, quiet: bool) -> Result:
    """The last result; meanwhile a bar on stderr says how far the search is and what it has."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not sys.stderr.isatty()) as progress:
        import threading

        task = progress.add_task("searching", total=time_limit)
        done = threading.Event()

        def tick() -> None:
            while not done.wait(0.2):
                progress.advance(task, 0.2)

        threading.Thread(target=tick, daemon=True).start()
        results = iter(search)
        result = None
        while True:
            try:
                result = next(results)
                progress.update(task, description=summary(result))
            except StopIteration:
                break
            except KeyboardInterrupt:
                search.cancel()
        done.set()
    assert result is not None, "a search always ends with a result"
    return result


def _deliver(result: Result, output: Path | None, html: Path | None, json: bool) -> None:
    if result.schedule:
        from optpipe.files import ScheduleFile

        if output:
            bound = result.lower_bound_ms if result.objective == "makespan" else None  # the file's bound is one on the makespan
            ScheduleFile.of(result.schedule, _found(result) if bound else "feasible", bound).save(output)
        if html:
            from optpipe.show.page import page

            html.write_text(page(result.schedule, result.lower_bound_ms))
    if json:
        print_json(figures(result))
    else:
        typer.echo(summary(result))
        for note in result.notes:
            typer.echo(f"note: {note}", err=True)
        if output and result.schedule:
            typer.echo(f"written to {output}")
    if result.status == "infeasible":
        raise typer.Exit(INFEASIBLE)
    if result.schedule is None:
        raise typer.Exit(1)
