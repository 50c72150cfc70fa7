"""`optpipe solve`: find the best schedule of a problem within a time limit."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from optpipe import solvers
from optpipe.anytime import Search, search
from optpipe.comparison import is_search
from optpipe.errors import OptPipeError
from optpipe.formats.stacks import restricted
from optpipe.model.problem import Problem
from optpipe.options import SolveOptions, StackName
from optpipe.results import Result
from optpipe.schedule import Schedule, ScheduleFile
from optpipe.show.page import plot
from optpipe.text import printable
from optpipe_cache import Cache, user_cache
from optpipe_cli.compare import best_published, gain_lines
from optpipe_cli.jobs import ServiceSearch
from optpipe_cli.options import Json, NewFile, NoCache, Options, Output, ProblemPath
from optpipe_cli.output import INFEASIBLE, ctrl_c_calls, echo, print_json, print_table, shown_while

STEPS = 5  # of the incumbents so far, the last ones
NOTES = 2  # likewise


def solve(
    problem: ProblemPath,
    /,
    *,
    options: Annotated[Options[SolveOptions], Parameter(group="Search")] = SolveOptions(),
    warm_start: Annotated[Path | None, Parameter(help="A schedule file to start from.")] = None,
    url: Annotated[str | None, Parameter(help="Let the service at this address search. Default: this machine.")] = None,
    no_cache: NoCache = False,
    output: Output = None,
    html: Annotated[NewFile, Parameter(help="Write a page with its picture here.")] = None,
    json: Json = False,
) -> None:
    """`optpipe solve`."""
    posed = restricted(Problem.load(problem), options)
    start = Schedule.load(warm_start) if warm_start else None
    if url:
        running: Search | ServiceSearch = ServiceSearch(url, posed, options, start)
    else:
        solvers.require_method(options.method)  # here, not when its process has started
        running = search(posed, options, start, None if no_cache else usable_cache())
    if not (json or sys.stderr.isatty()):  # a terminal shows more
        echo(f"searching, for {options.time_limit_s:g} s at most", err=True)
    began, on_terminal = time.monotonic(), not json and sys.stderr.isatty()
    with (
        ctrl_c_calls(running.cancel),
        shown_while(lambda: view(running.best, time.monotonic() - began, options.time_limit_s), on_terminal),
    ):
        *_, result = running
    try:
        _print_result(result, json, posed if is_search(options.method) else None, options.stack)
    finally:  # also if stdout is closed
        bound = result.lower_bound_ms if result.objective == "makespan" else None  # files and pages have the makespan's
        if result.schedule and output:
            status = "feasible" if bound is None else result.found_status
            ScheduleFile.from_schedule(result.schedule, status, bound).save(output)
        if result.schedule and html:
            plot(result.schedule, lower_bound_ms=bound).save(html)
    if result.schedule is None:
        raise SystemExit(INFEASIBLE if result.status == "infeasible" else 1)
    written = [str(file) for file in (output, html) if file]
    if written and not json:
        echo(f"written to {', '.join(written)}")


def usable_cache() -> Cache | None:
    """The user's cache. One that cannot be used is reported and changes nothing else."""
    try:
        return user_cache()
    except OptPipeError as error:
        echo(f"note: {error}", err=True)
        return None


def _print_result(result: Result, json: bool, searched: Problem | None, stack: StackName) -> None:
    """Print a result; of a problem that was `searched`, beside the best published schedule that the stack runs."""
    if json:
        print_json(result.to_dict())
        return
    echo(str(result))
    if result.schedule and searched:
        before = best_published(searched, result.placements, result.objective, stack)
        where = " on the stages as given" if result.placements == "keep" else ""
        for line in gain_lines(before, result.schedule, result.objective, where) if before else ():
            print_table(line)
    for note in result.notes:
        if note != result.reason:
            echo(f"note: {note}", err=True)


def view(result: Result, passed_s: float, time_limit_s: float) -> RenderableType:
    """One frame."""
    figures = {"best": "none yet", "bound": _ms(result.lower_bound_ms)}
    if result.schedule:
        gap = "not known" if result.gap is None else f"{result.gap:.1%}" if result.gap else "proven optimal"
        figures["best"] = f"{_ms(result.value_ms)} by {result.method}"
        figures |= {"gap": gap, "bubble": f"{result.schedule.timeline.bubble:.1%}"}
    head = Table.grid(padding=(0, 3))
    head.add_row(*(Text.assemble((f"{name} ", "dim"), (printable(value), "bold")) for name, value in figures.items()))
    clock = Table.grid(padding=(0, 2), expand=False)
    clock.add_row(
        ProgressBar(total=time_limit_s, completed=min(passed_s, time_limit_s), width=40),
        Text(f"{passed_s:.0f} s of {time_limit_s:g} s, Ctrl-C keeps the best", "dim"),
    )
    steps = Table.grid(padding=(0, 3))
    for step in result.history[-STEPS:]:
        method = Text(printable(step.method), "cyan")
        steps.add_row(Text(f"{step.time_s:8.1f} s", "dim"), f"{step.value_ms:.6g} ms", method)
    return Group(head, clock, steps, *(Text(printable(note), "dim") for note in result.notes[-NOTES:]))


def _ms(value: float | None) -> str:
    return "not known" if value is None else f"{value:.6g} ms"
