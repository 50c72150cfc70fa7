"""`optpipe solve`: find the best schedule of a problem within a time limit."""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from optpipe_cli.output import INFEASIBLE, Json, figures, print_json, require_writable

if TYPE_CHECKING:
    from optpipe.anytime import Result, Search
    from optpipe.schedule import Found, Schedule
    from optpipe_cache import Cache

T = TypeVar("T")


class Objective(StrEnum):
    makespan = "makespan"
    span = "span"


class Placements(StrEnum):
    keep = "keep"
    all = "all"


def solve(
    problem: Annotated[Path, typer.Argument(help="A problem file.")],
    method: Annotated[
        str,
        typer.Option(
            help="auto, an engine (cyclic, lns, cpsat, milp), "
            "a heuristic (naive, zb-auto, adaoffload) or a published schedule"
            " such as 1f1b or gis:group=5 (`optpipe compare` lists them)."
        ),
    ] = "auto",
    time_limit: Annotated[float, typer.Option(help="Time limit in seconds.")] = 60.0,
    threads: Annotated[int | None, typer.Option(help="Threads. Default: all cores.")] = None,
    objective: Annotated[
        Objective, typer.Option(help="makespan, or span: the longest time of one device.")
    ] = Objective.makespan,
    warm_start: Annotated[Path | None, typer.Option(help="A schedule file to start from.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of random choices.")] = 0,
    solver: Annotated[
        str, typer.Option(help="Of the MILP: auto, highs, gurobi, pulp, or one of PuLP's, such as pulp:cbc.")
    ] = "auto",
    milp_ops: Annotated[
        int | None,
        typer.Option(help="Compute ops up to which milp solves the problem whole. Default: 100; none with Gurobi."),
    ] = None,
    placements: Annotated[
        Placements,
        typer.Option(
            help="keep the stages, or try all: one chunk a device, looped or V-shaped chunks, the layers split anew."
        ),
    ] = Placements.keep,
    jitter: Annotated[
        float,
        typer.Option(help="Standard deviation of op times, as a share such as 0.05: minimise the 95th percentile."),
    ] = 0.0,
    memory_mib: Annotated[
        int | None, typer.Option(help="Memory limit for all solver processes together, in MiB.")
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Neither look the problem up nor store the answer.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the schedule file here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with its picture here.")] = None,
    json: Json = False,
) -> None:
    """Find the best schedule within the time limit. Ctrl-C ends the search and keeps the best so far."""
    from optpipe.anytime import Result, improve
    from optpipe.errors import InputError
    from optpipe.model.problem import Problem
    from optpipe.schedule import Schedule

    require_writable(output)
    require_writable(html)
    what = Problem.load(problem)
    start = Schedule.load(warm_start) if warm_start else None
    cache = None if no_cache else _unless_broken(_cache)
    hit = None
    if cache and start is None and method == "auto":
        hit = _unless_broken(lambda: cache.lookup(what, objective.value))
    if hit and hit.status == "optimal" and not jitter and placements is Placements.keep:
        result = Result("optimal", hit.schedule, objective.value, hit.lower_bound_ms, f"{hit.schedule.method} (cached)")
    else:
        start = start or (hit.schedule if hit else None)
        try:
            search = improve(
                what,
                method=method,
                time_limit=time_limit,
                threads=threads,
                objective=objective.value,
                warm_start=start,
                seed=seed,
                solver=solver,
                milp_ops=milp_ops,
                placements=placements.value,
                jitter=jitter,
                memory_mib=memory_mib,
            )
        except InputError as error:  # names a parameter, which the user knows as an option
            raise InputError(
                re.sub(r"^improve: (\w+)", lambda found: f"--{found[1].replace('_', '-')}", str(error))
            ) from None
        result = _follow(search, time_limit, quiet=json)
    if cache and result.schedule:
        found = result.schedule
        _unless_broken(lambda: cache.add(found, _found(result), result.lower_bound_ms, objective.value, verified=True))
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


def _follow(search: Search, time_limit: float, quiet: bool) -> Result:
    """Return the last result; meanwhile a bar on stderr shows the progress."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    result = None
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.2):
            progress.advance(task, 0.2)

    def interrupt(*_: object) -> None:
        # In a thread, because the main thread may hold the lock that `cancel` needs.
        threading.Thread(target=search.cancel, daemon=True).start()

    before = signal.signal(signal.SIGINT, interrupt)
    with Progress(*columns, console=console, transient=True, disable=quiet or not sys.stderr.isatty()) as progress:
        task = progress.add_task("searching", total=time_limit)
        threading.Thread(target=tick, daemon=True).start()
        try:
            for result in search:
                progress.update(task, description=str(result))
        finally:
            done.set()
            signal.signal(signal.SIGINT, before)
    assert result is not None, "a search always ends with a result"
    return result


def _tell(result: Result, json: bool) -> None:
    if json:
        print_json(figures(result))
        return
    typer.echo(str(result))
    for note in result.notes:
        if note != result.reason:
            typer.echo(f"note: {note}", err=True)


def _write(result: Result, schedule: Schedule, output: Path | None, html: Path | None) -> None:
    from optpipe.model.problem import write_file
    from optpipe.schedule import ScheduleFile
    from optpipe.show.page import page

    if output:
        bound = result.lower_bound_ms if result.objective == "makespan" else None  # a file's bound is on the makespan
        ScheduleFile.of(schedule, _found(result) if bound is not None else "feasible", bound).save(output)
    if html:
        write_file(html, page(schedule, result.lower_bound_ms))
