"""`optpipe solve`: find the best schedule of a problem within a time limit."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from optpipe_cli.options import with_options
from optpipe_cli.output import INFEASIBLE, Json, figures, print_json, require_writable

if TYPE_CHECKING:
    from optpipe.anytime import Result, Search
    from optpipe.options import SolveOptions
    from optpipe.schedule import Found, Schedule
    from optpipe_cache import Cache

T = TypeVar("T")


@with_options("SolveOptions")
def solve(
    problem: Annotated[Path, typer.Argument(help="A problem file.")],
    options: SolveOptions,
    warm_start: Annotated[Path | None, typer.Option(help="A schedule file to start from.")] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Neither look the problem up nor store the answer.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the schedule file here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with its picture here.")] = None,
    json: Json = False,
) -> None:
    """Find the best schedule within the time limit. Ctrl-C ends the search and keeps the best so far."""
    from optpipe.anytime import Result, improve
    from optpipe.model.problem import Problem
    from optpipe.schedule import Schedule

    require_writable(output)
    require_writable(html)
    what = Problem.load(problem)
    start = Schedule.load(warm_start) if warm_start else None
    cache = None if no_cache else _unless_broken(_cache)
    hit = None
    if cache and start is None and options.method == "auto":
        hit = _unless_broken(lambda: cache.lookup(what, options.objective))
    if hit and hit.status == "optimal" and options.answered_by_optimum:
        result = Result.of(hit.schedule, options, hit.lower_bound_ms, f"{hit.schedule.method} (cached)")
    else:
        search = improve(what, warm_start=start or (hit.schedule if hit else None), **options.arguments())
        result = _follow(search, options.time_limit_s, quiet=json)
    if cache and result.schedule:
        found = result.schedule
        _unless_broken(
            lambda: cache.add(found, _found(result), result.lower_bound_ms, options.objective, verified=True)
        )
    try:
        _tell(result, json)
    finally:  # also if stdout is closed
        if result.schedule:
            _write(result, result.schedule, output, html)
    if result.schedule is None:
        raise typer.Exit(INFEASIBLE if result.status == "infeasible" else 1)
    if output and not json:
        typer.echo(f"written to {output}")


def _cache() -> Cache:
    from optpipe_cache import Cache, default_path

    return Cache(default_path())


def _unless_broken(use: Callable[[], T]) -> T | None:
    """Return what the cache answers. An unusable cache is reported and changes nothing else."""
    from optpipe.errors import OptPipeError

    try:
        return use()
    except OptPipeError as error:
        typer.echo(f"note: {error}", err=True)
        return None


def _found(result: Result) -> Found:
    return "optimal" if result.status == "optimal" else "feasible"


def _follow(search: Search, time_limit_s: float, quiet: bool) -> Result:
    """Return the last result; meanwhile a terminal shows what is known."""
    from optpipe_cli.live import shown

    def interrupt(*_: object) -> None:
        # In a thread, because the main thread may hold the lock that `cancel` needs.
        threading.Thread(target=search.cancel, daemon=True).start()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with shown(lambda: search.known, time_limit_s, on=not quiet and sys.stderr.isatty()):
            *_, last = search
    finally:
        signal.signal(signal.SIGINT, before)
    return last


def _tell(result: Result, json: bool) -> None:
    if json:
        print_json(figures(result))
        return
    typer.echo(str(result))
    for note in result.notes:
        if note != result.reason:
            typer.echo(f"note: {note}", err=True)


def _write(result: Result, schedule: Schedule, output: Path | None, html: Path | None) -> None:
    from optpipe.schedule import ScheduleFile

    bound = result.lower_bound_ms if result.objective == "makespan" else None  # files and pages have the makespan's
    if output:
        ScheduleFile.of(schedule, _found(result) if bound is not None else "feasible", bound).save(output)
    if html:
        schedule.plot(lower_bound_ms=bound).save(html)
