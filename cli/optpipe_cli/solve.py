"""`optpipe solve`: find the best schedule of a problem within a time limit."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe_cli.options import with_options
from optpipe_cli.output import (
    INFEASIBLE,
    Json,
    ProblemPath,
    ScheduleOutput,
    echo,
    figures,
    print_json,
    print_table,
    require_writable,
)

if TYPE_CHECKING:
    from optpipe.anytime import Search
    from optpipe.model.problem import Problem
    from optpipe.options import SolveOptions
    from optpipe.results import Result
    from optpipe.schedule import Schedule
    from optpipe_cache import Cache


@with_options("SolveOptions")
def solve(
    problem: ProblemPath,
    options: SolveOptions,
    warm_start: Annotated[Path | None, typer.Option(help="A schedule file to start from.")] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Neither look the problem up nor store the answer.")
    ] = False,
    output: ScheduleOutput = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with its picture here.")] = None,
    json: Json = False,
) -> None:
    """Find the best schedule within the time limit. Ctrl-C ends the search and keeps the best so far."""
    from optpipe.anytime import improve
    from optpipe.model.problem import Problem
    from optpipe.schedule import Schedule

    require_writable(output)
    require_writable(html)
    posed = Problem.load(problem)
    start = Schedule.load(warm_start) if warm_start else None
    if not (json or sys.stderr.isatty()):  # a terminal shows more
        echo(f"searching, for {options.time_limit_s:g} s at most", err=True)
    search = improve(posed, warm_start=start, cache=None if no_cache else usable_cache(), **options.arguments())
    result = _last_result(search, options.time_limit_s, quiet=json)
    try:
        _tell(result, json)
        if not json and result.placements == "keep" and _has_other_stages(posed, options.method):
            echo(f"note: other stages were not searched: optpipe solve {problem} --placements all", err=True)
    finally:  # also if stdout is closed
        if result.schedule:
            _write(result, result.schedule, output, html)
    if result.schedule is None:
        raise typer.Exit(INFEASIBLE if result.status == "infeasible" else 1)
    if output and not json:
        echo(f"written to {output}")


def usable_cache() -> Cache | None:
    """The user's cache. One that cannot be used is reported and changes nothing else."""
    from optpipe.errors import OptPipeError
    from optpipe_cache import user_cache

    try:
        return user_cache()
    except OptPipeError as error:
        echo(f"note: {error}", err=True)
        return None


def _last_result(search: Search, time_limit_s: float, quiet: bool) -> Result:
    """Return the last result; meanwhile a terminal shows what is known."""
    from optpipe_cli.live import ctrl_c_calls, shown_while, view

    began, on_terminal = time.monotonic(), not quiet and sys.stderr.isatty()
    with (
        ctrl_c_calls(search.cancel),
        shown_while(lambda: view(search.best, time.monotonic() - began, time_limit_s), on_terminal),
    ):
        *_, last = search
    return last


def _has_other_stages(problem: Problem, method: str) -> bool:
    """Whether a search could choose other stages: on several devices, on one route, by a method that searches."""
    from optpipe.comparison import is_search

    return is_search(method) and len(problem.devices) > 1 and len(problem.all_routes) == 1


def _tell(result: Result, json: bool) -> None:
    if json:
        print_json(figures(result))
        return
    echo(str(result))
    for line in _gain(result):
        print_table(line)
    for note in result.notes:
        if note != result.reason:
            echo(f"note: {note}", err=True)


def _gain(result: Result) -> Iterator[str]:
    """What the answer gains over the best published schedule on the stages as given, and why."""
    from optpipe_cli.why import best_published, gain_lines

    if result.schedule and result.schedule.placement is None and result.objective == "makespan":
        before = best_published(result.schedule.problem)
        yield from gain_lines(before, result.schedule) if before else ()


def _write(result: Result, schedule: Schedule, output: Path | None, html: Path | None) -> None:
    from optpipe.schedule import ScheduleFile
    from optpipe.show.page import plot

    bound = result.lower_bound_ms if result.objective == "makespan" else None  # files and pages have the makespan's
    if output:
        ScheduleFile.from_schedule(schedule, result.found_status if bound is not None else "feasible", bound).save(
            output
        )
    if html:
        plot(schedule, lower_bound_ms=bound).save(html)
